// What one kernel of NCCL does: the operations of a group on one communicator, or a single operation.
#pragma once

#include <string>
#include <vector>

#include "communicator.h"

namespace nccl {

enum class What { all_reduce, reduce_scatter, all_gather, broadcast, reduce, all_to_all };

struct Collective {
  What what;
  const void* from;
  void* to;
  size_t count;  // as NCCL counts for this operation: of one rank's part, where ranks have parts
  Type type;
  int operation, root;
  double factor = 1;  // that each number is multiplied by first
};

struct Message {
  bool sends;
  void* address;
  size_t size;
  int peer;
};

class Plan : public simulation::Meeting {
 public:
  explicit Plan(Communicator* communicator) : communicator_(communicator) {}
  void add(const Collective& collective) { collectives_.push_back(collective); }
  void add(const Message& message) { messages_.push_back({message, 0}); }
  // Puts the kernel onto the stream; whether it took it.
  static bool enqueue(const std::shared_ptr<Plan>& plan, void* stream);
  Communicator* communicator() const { return communicator_; }

  void arrive(int64_t time) override;
  void publish() override;
  int64_t met() override;
  int64_t horizon() override;

 private:
  struct Numbered {
    Message message;
    uint64_t number;  // among those of this pair and direction
  };

  bool needs_no_kernel() const;
  // Gives a task its place among those of the communicator, just before it goes onto a stream.
  static void place(const std::shared_ptr<Plan>& plan, simulation::Task& task, void* stream);
  std::string name() const;
  double extra_ns(double bytes) const;
  double duration_ns() const;
  bool moves_data() const;
  size_t published(const Collective& collective, int rank) const;
  Arrival& side(const Numbered& one, bool own) const;
  std::string message_file(const Numbered& one) const;
  void wait_for_data(Arrival& arrival, uint64_t number) const;
  void finish();
  void spoil();
  bool was_disturbed() const;
  void compute(const Collective& collective, const std::vector<const char*>& parts) const;

  Communicator* communicator_;
  std::vector<Collective> collectives_;
  std::vector<Numbered> messages_;
  uint64_t number_ = 0;  // of the collective part
  int64_t start_ = -1;
  // What lies where it reads and writes until it ends, and how often anything had been written by then.
  std::vector<std::pair<const char*, std::vector<char>>> lies_;
  uint64_t changes_ = 0;
};

}  // namespace nccl
