// The two threads of the simulation, and how the host waits for it.
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "engine.h"
#include "faults.h"

namespace simulation {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;

// Events that are nearer than this are walked in one go: nothing is lost, since their times do not depend on it.
constexpr int64_t least_sleep_ns = 100'000;

}  // namespace

void Simulation::start_threads() {
  std::thread([this] {
    pthread_setname_np(pthread_self(), "simulated-gpu");
    run();
  }).detach();
  std::thread([this] {
    pthread_setname_np(pthread_self(), "simulated-data");
    run_errands();
  }).detach();
  atexit([] {
    std::lock_guard<std::mutex> held(get().lock);
    flush_log();
  });
}

void Simulation::run() {
  std::unique_lock<std::mutex> held(lock);
  int64_t last_step = now();
  uint64_t steps = 0;
  for (;;) {
    int64_t next = advance();
    int64_t present = now();
    bool idle = std::all_of(devices_.begin(), devices_.end(), [](Device* one) { return one->active.empty(); });
    if (steps != steps_ || idle) {
      steps = steps_;
      last_step = present;
    } else if (settings().stall_s > 0 && static_cast<double>(present - last_step) > 1e9 * settings().stall_s) {
      tell_queues();
      last_step = present;
    }
    if (idle) flush_log();
    if (polls_) {
      fed.wait_for(held, microseconds(100));
    } else if (next == never) {
      fed.wait_for(held, milliseconds(50));
    } else {
      fed.wait_for(held, nanoseconds(std::clamp<int64_t>(next - present, least_sleep_ns, 50'000'000)));
    }
  }
}

void Simulation::wait_until(std::unique_lock<std::mutex>& held, const std::function<bool()>& done) {
  for (;;) {
    advance();
    if (done() || fault(Fault::device)) break;
    visible.wait_for(held, milliseconds(5));
  }
  flush_log();  // what was waited for is in the log, also where a process ends without its last functions
}

void Simulation::tell_queues() const {
  static const char* const kinds[] = {"kernel", "collective",    "copy",        "memset",    "record",
                                      "wait",   "host function", "write value", "wait value"};
  int64_t present = now();
  fprintf(stderr, "[simulated GPU, process %d] nothing moves; simulated time is %.1f ms behind\n", getpid(),
          static_cast<double>(present - now_) / 1e6);
  for (const Device* device : devices_) {
    for (const Stream* stream : device->active) {
      fprintf(stderr, "  device %d, stream %u:", device->index, stream->id);
      if (const Task* task = stream->running.get()) {
        fprintf(stderr, " runs %s %.60s for %.1f ms%s;", kinds[static_cast<int>(task->kind)],
                demangled(task->name).c_str(), static_cast<double>(present - task->start) / 1e6,
                task->meeting && task->met < 0 ? ", not met" : "");
      }
      for (size_t i = 0; i < std::min<size_t>(6, stream->queue.size()); i++) {
        const Task& task = *stream->queue[i];
        bool blocked = task.kind == Kind::event_wait && !task.moment->reached;
        fprintf(stderr, " %s %.40s%s,", kinds[static_cast<int>(task.kind)], demangled(task.name).c_str(),
                blocked ? "(open)" : "");
      }
      fprintf(stderr, " %zu in the queue\n", stream->queue.size());
    }
  }
}

}  // namespace simulation
