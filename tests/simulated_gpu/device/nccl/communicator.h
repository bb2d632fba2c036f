// A communicator: where its ranks, processes of one machine, meet in shared memory.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "../core/simulation.h"
#include "types.h"

namespace nccl {

// That a rank is there, for the n-th time. A rank is never more than one number ahead of another's reading, since it
// goes on only when all have come: few slots serve in turn.
struct Arrival {
  std::atomic<uint64_t> number;  // n + 1; written after the time
  std::atomic<int64_t> time;
  std::atomic<uint64_t> data;  // n + 1 once this rank's data can be read
};

struct Member {
  std::atomic<int> process;
  int global_rank;
};

struct SplitChoice {
  std::atomic<uint64_t> number;
  int color, key;
};

// The shared memory of a communicator.
class Board {
 public:
  static constexpr size_t slots = 4, messages = 256;
  Board(const std::string& folder, int ranks);
  Member& member(int rank) { return members_[rank]; }
  SplitChoice& split(int rank, uint64_t number) { return splits_[rank * slots + number % slots]; }
  Arrival& arrival(int rank, uint64_t number) { return arrivals_[rank * slots + number % slots]; }
  // Of a message: the sender's side or the receiver's. One group may hold many for the same rank.
  Arrival& message(int from, int to, bool sender, uint64_t number) {
    return messages_[((from * ranks_ + to) * 2 + (sender ? 1 : 0)) * messages + number % messages];
  }

 private:
  int ranks_;
  Member* members_;
  SplitChoice* splits_;
  Arrival *arrivals_, *messages_;
};

// Data of one rank that the others read: two files in turn, kept mapped.
class SharedData {
 public:
  explicit SharedData(std::string file) : file_(std::move(file)) {}
  char* writable(size_t size);
  const char* readable(size_t size);

 private:
  void map(size_t size, bool write);
  std::string file_;
  char* address_ = nullptr;
  size_t size_ = 0;
};

// Before which time another rank can do nothing new.
class Peer {
 public:
  Peer(int process, int global_rank);
  int64_t horizon();
  int global_rank() const { return global_rank_; }

 private:
  std::atomic<int64_t>* shared_;
  int64_t seen_ = -1, seen_at_ = 0;
  int global_rank_;
};

class Communicator {
 public:
  Communicator(std::string folder, int rank, int size);
  // Waits until all ranks have made theirs; whether they have in time.
  bool meet();
  // A new communicator of the ranks that give the same color, in the order of their keys; null without a color.
  bool split(int color, int key, Communicator** made);
  // Bytes per nanosecond of a ring over all ranks, or between this rank and another.
  double ring_bandwidth() const;
  double link_bandwidth(int peer) const;

  SharedData& data(int rank, uint64_t number) { return data_[2 * rank + number % 2]; }

  const std::string folder;
  const int rank, size;
  Board board;
  std::vector<Peer> peers;
  uint64_t collectives = 0;                // so many were enqueued
  std::map<int, uint64_t> sent, received;  // messages, by peer
  std::map<int, double> factors;           // of custom reductions
  // NCCL runs the operations of a communicator in their order, on whatever streams they are.
  std::shared_ptr<simulation::Moment> last;
  void* last_stream = nullptr;
  std::atomic<bool> aborted{false};

 private:
  std::vector<SharedData> data_;
  uint64_t splits_ = 0;
};

}  // namespace nccl
