// The simulated device: what the libraries that stand in for CUDA's share.
//
// A discrete-event simulation, paced by the real clock: its time never runs ahead of CLOCK_MONOTONIC, but what happens
// on the device happens at exact times, however late the threads of this process wake up. Only the host's own lateness
// is real: a task cannot begin before the host has enqueued it.
//
// Time and data are apart. The simulation decides when a task begins and ends; a worker then moves the data, in the
// order of simulated time, and only then the host sees the task done. So the time that a large reduction takes on the
// host's processor blurs nothing.
//
// All times are nanoseconds of CLOCK_MONOTONIC.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "settings.h"

namespace simulation {

enum class Kind {
  kernel,
  collective,
  memcpy,
  memset,
  event_record,
  event_wait,
  host_function,
  value_write,
  value_wait
};
enum class Class { compute, communication, copy, none };

// A point of a stream: an event's recording, or a task's end.
struct Moment {
  bool reached = false;  // in simulated time
  bool visible = false;  // to the host: what came before has moved its data too
  int64_t time = 0;
};

// How a collective's kernel meets those of the other ranks.
struct Meeting {
  virtual ~Meeting() = default;
  virtual void arrive(int64_t time) = 0;  // this rank's kernel has begun
  virtual void publish() = 0;             // hand over this rank's data; called by the worker
  virtual int64_t met() = 0;              // when the last rank arrived; -1: not known yet
  virtual int64_t horizon() = 0;          // no rank that is missing arrives before this
};

struct Task {
  Kind kind = Kind::kernel;
  Class task_class = Class::compute;
  std::string name;
  double alone_ns = 0;  // duration with nothing else on the device, at full clock
  int grid[3] = {1, 1, 1}, block[3] = {1, 1, 1};
  uint32_t shared_bytes = 0;
  uint16_t registers = 32;  // of a thread
  int multiprocessors = 0;  // over which its blocks come in waves; 0: all
  int channels = 0;         // of a collective
  uint64_t bytes = 0;       // of a copy
  int copy_kind = 0;        // cudaMemcpyKind; of a memset, its value
  uint32_t correlation = 0;
  bool profiled = false;
  std::shared_ptr<Moment> moment;    // event_wait: what it waits for; else what is reached with its end
  std::function<void()> at_begin;    // what it does when it begins: it reads
  std::function<void()> effect;      // what it does to memory, or the host function
  std::shared_ptr<Meeting> meeting;  // of a collective
  // Of a graph's node: gives a copy of the task what belongs to one launch alone, just before it goes onto a stream.
  std::function<void(Task&, void* stream)> renew;
  std::atomic<uint32_t>* word = nullptr;  // of a value_write or value_wait, in the host's memory
  uint32_t value = 0;
  uint32_t graph = 0;  // that it is a node of, and which
  uint64_t node = 0;

  int64_t enqueued = 0, start = -1, met = -1, end = -1;
  double left_ns = 0;
  int64_t returned = -1;  // of a host function: when
};

struct Stream;

EXPORTED int64_t now();
EXPORTED int current_device();
void set_current_device(int device);
int priority_of(void* stream);

// A blocking stream is one that the legacy default stream waits for.
void* make_stream(int priority, bool blocking = false);
void end_stream(void* stream);
// Puts a task at the end of a stream, or into the graph that it captures. 0, or the number of CUDA's error.
EXPORTED int enqueue(void* stream, std::shared_ptr<Task> task);
EXPORTED bool is_capturing(void* stream);
// A task that only waits for a moment, or is one.
EXPORTED std::shared_ptr<Task> mark(Kind kind, std::shared_ptr<Moment> moment = nullptr);
bool stream_is_done(void* stream);
void wait_for_stream(void* stream);
void wait_for_device(int device);
bool is_visible(const std::shared_ptr<Moment>& moment);
void wait_for(const std::shared_ptr<Moment>& moment);
// Whether a wait for it would be over at once.
bool has_passed(const std::shared_ptr<Moment>& moment);

// The host's record of the time before which nothing new can begin on this process's devices: other ranks read it.
EXPORTED std::string horizon_file(int process);
EXPORTED void share_horizon();
// Looks again, now: something that tasks wait for outside the simulation has changed.
EXPORTED void wake();

// -- calls of the host, for CUPTI

struct Call {
  uint32_t id = 0;
  bool driver = false;
  int64_t start = 0, end = 0;
  uint32_t correlation = 0, thread = 0;
};

// What the CUPTI library wants to hear.
struct Profiler {
  bool (*wants)(const Task&);
  void (*call_begins)(uint32_t correlation);
  void (*call_ended)(const Call&);
  void (*task_ended)(const Task&, int device, uint32_t stream);
};
EXPORTED void set_profiler(const Profiler*);

// A call of the runtime or the driver, from its construction to its end. Calls within it are part of it.
class EXPORTED ApiCall {
 public:
  explicit ApiCall(uint32_t id, bool driver = false);
  ~ApiCall();
  ApiCall(const ApiCall&) = delete;
  ApiCall& operator=(const ApiCall&) = delete;

 private:
  Call call_;
};

// -- durations

// By the rules of SIMGPU_RULES; `otherwise` where none fits.
EXPORTED double duration_by_rule(const std::string& name, double otherwise);
EXPORTED double product_ns(const std::string& type, double flop);
// In how many waves a kernel's blocks come over so many multiprocessors.
EXPORTED double waves(const Task& task, int multiprocessors);
std::string demangled(const std::string& name);

}  // namespace simulation
