// The state of the simulation, for the files of core/ alone.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "power.h"
#include "settings.h"
#include "simulation.h"

namespace simulation {

struct Capture;

constexpr int64_t never = INT64_MAX;

struct Stream {
  Stream(uint32_t id, int device, int priority, bool blocking)
      : id(id), device(device), priority(priority), blocking(blocking) {}
  uint32_t id;
  int device, priority;
  bool blocking;
  std::shared_ptr<Capture> capture;  // that it takes part in
  std::deque<std::shared_ptr<Task>> queue;
  std::shared_ptr<Task> running;
  uint64_t enqueued = 0, visible = 0;  // tasks: put at the end; done, with their data moved
  bool active = false;                 // stands in Device::active
};

struct Device {
  explicit Device(int index) : index(index), default_stream(7, index, 0, false), power(index) {}
  int index;
  Stream default_stream;  // 7, as the profiler shows it on real devices
  std::vector<Stream*> streams;
  std::vector<Stream*> active;  // those with something to do: few of the many that torch makes
  // From when on communication ran at which rate: a collective may learn late when it met the other ranks.
  std::deque<std::pair<int64_t, double>> communication_rates;
  PowerModel power;
};

// Data to move and things to tell the host, in the order of simulated time.
struct Errand {
  std::function<void()> work;  // may be empty
  std::shared_ptr<Task> task;  // that is visible afterwards; none: only work
  Stream* stream = nullptr;
};

class Simulation {
 public:
  static Simulation& get();

  // All of these need `lock`.
  Stream* stream(void* handle);
  Device& device(int index) { return *devices_.at(index); }
  void push(Stream* stream, std::shared_ptr<Task> task);
  // Takes the task if the stream captures; the error of an enqueueing there.
  int capture(void* handle, Stream* stream, std::shared_ptr<Task>& task);
  // Brings the devices to the present. When the next thing happens by what is known now; `never` if nothing waits.
  int64_t advance();
  Stream* make_stream(int device, int priority, bool blocking);
  void share_horizon();

  std::mutex lock;
  std::condition_variable visible;  // the host can see more than before
  std::condition_variable fed;      // for the simulation's thread: look again
  void wait_until(std::unique_lock<std::mutex>& held, const std::function<bool()>& done);

 private:
  Simulation();
  void start_threads();
  void run();          // the simulation's thread
  void run_errands();  // the worker's

  void forget_idle_streams();
  void start_tasks(int64_t& next);
  bool start_next(Stream& stream, int64_t& next);
  // Looks which collectives have met; the time beyond which nothing is known until other ranks tell more.
  int64_t meet();
  void begin_transfer(Device& device, Task& task);
  struct Running {
    Device* device;
    Stream* stream;
    double rate;
  };
  std::vector<Running> running(int64_t& next);
  using InFlight = PowerModel::Load;
  static InFlight in_flight(const Device& device);
  static double rate(const Device& device, const Task& task, const InFlight& present);
  void finish(Device& device, Stream& stream);
  void pass(Stream& stream, std::shared_ptr<Task> task);
  void hand_over(Errand errand);
  void show(const Errand& errand);
  void tell_queues() const;

  std::vector<Device*> devices_;
  int64_t now_ = 0;
  uint64_t steps_ = 0;  // ends and passages so far
  bool polls_ = false;  // a collective waits for other ranks
  bool started_ = false;
  uint32_t next_stream_ = 13;
  std::deque<Errand> errands_;
  bool busy_ = false;  // the worker is at an errand
  std::condition_variable errands_fed_;
  std::atomic<int64_t>* horizon_ = nullptr;
};

// -- calls.cpp
void tell_profiler(const Task& task, int device, uint32_t stream);

// -- log.cpp
void log_task(const Task& task, int device, uint32_t stream);
void flush_log();

}  // namespace simulation
