// What the other libraries may ask of the simulation, and the calls of the host that CUPTI hears of.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>

#include "engine.h"

namespace simulation {
namespace {

thread_local int device_of_thread = 0;
std::atomic<const Profiler*> the_profiler{nullptr};
std::atomic<uint32_t> next_correlation{1};
thread_local int call_depth = 0;
thread_local uint32_t correlation_of_call = 0;

using Held = std::unique_lock<std::mutex>;

}  // namespace

int64_t now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000LL + time.tv_nsec;
}

int current_device() { return device_of_thread; }
void set_current_device(int device) { device_of_thread = device; }

// Null and the two special handles are the default stream of the current device.
Stream* Simulation::stream(void* handle) {
  if (reinterpret_cast<uintptr_t>(handle) <= 2) return &device(device_of_thread).default_stream;
  return static_cast<Stream*>(handle);
}

int priority_of(void* stream) {
  Simulation& simulation = Simulation::get();
  Held held(simulation.lock);
  return simulation.stream(stream)->priority;
}

void* make_stream(int priority, bool blocking) {
  Simulation& simulation = Simulation::get();
  Held held(simulation.lock);
  return simulation.make_stream(device_of_thread, priority, blocking);
}

// What stands in it still runs, as CUDA promises, so it stays.
void end_stream(void*) {}

std::shared_ptr<Task> mark(Kind kind, std::shared_ptr<Moment> moment) {
  auto task = std::make_shared<Task>();
  task->kind = kind;
  task->task_class = Class::none;
  task->moment = std::move(moment);
  return task;
}

int enqueue(void* handle, std::shared_ptr<Task> task) {
  Simulation& simulation = Simulation::get();
  Held held(simulation.lock);
  Stream* stream = simulation.stream(handle);
  if (int error = simulation.capture(handle, stream, task)) return error;
  if (!task) return 0;  // a graph has it
  if (!task->correlation) task->correlation = correlation_of_call;
  if (const Profiler* profiler = the_profiler.load()) task->profiled = profiler->wants(*task);
  simulation.push(stream, std::move(task));
  return 0;
}

bool stream_is_done(void* handle) {
  Simulation& simulation = Simulation::get();
  Held held(simulation.lock);
  Stream* stream = simulation.stream(handle);
  simulation.advance();
  return stream->visible == stream->enqueued;
}

void wait_for_stream(void* handle) {
  Simulation& simulation = Simulation::get();
  Held held(simulation.lock);
  Stream* stream = simulation.stream(handle);
  uint64_t wanted = stream->enqueued;
  simulation.wait_until(held, [=] { return stream->visible >= wanted; });
}

void wait_for_device(int index) {
  Simulation& simulation = Simulation::get();
  Held held(simulation.lock);
  std::vector<std::pair<Stream*, uint64_t>> wanted;
  for (Stream* stream : simulation.device(index).streams) wanted.emplace_back(stream, stream->enqueued);
  simulation.wait_until(held, [&] {
    for (auto& [stream, number] : wanted)
      if (stream->visible < number) return false;
    return true;
  });
}

bool is_visible(const std::shared_ptr<Moment>& moment) {
  Simulation& simulation = Simulation::get();
  Held held(simulation.lock);
  if (!moment->visible) simulation.advance();
  return moment->visible;
}

void wait_for(const std::shared_ptr<Moment>& moment) {
  Simulation& simulation = Simulation::get();
  Held held(simulation.lock);
  simulation.wait_until(held, [&] { return moment->visible; });
}

bool has_passed(const std::shared_ptr<Moment>& moment) {
  Held held(Simulation::get().lock);
  return moment->reached;
}

void wake() {
  Simulation& simulation = Simulation::get();
  Held held(simulation.lock);
  simulation.fed.notify_one();
}

// -- other ranks

std::string horizon_file(int process) { return settings().folder + "/horizon-" + std::to_string(process); }

void Simulation::share_horizon() {
  if (horizon_) return;
  int file = open(horizon_file(getpid()).c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600);
  if (file < 0 || ftruncate(file, sizeof *horizon_)) {
    perror("[simulated GPU] horizon");
    abort();
  }
  void* shared = mmap(nullptr, sizeof *horizon_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  horizon_ = new (shared) std::atomic<int64_t>(now_);
  fed.notify_one();
}

void share_horizon() {
  Simulation& simulation = Simulation::get();
  Held held(simulation.lock);
  simulation.share_horizon();
  simulation.advance();
}

// -- calls

void set_profiler(const Profiler* profiler) { the_profiler = profiler; }

void tell_profiler(const Task& task, int device, uint32_t stream) {
  const Profiler* profiler = the_profiler.load();
  if (profiler && task.profiled) profiler->task_ended(task, device, stream);
}

ApiCall::ApiCall(uint32_t id, bool driver) {
  call_.id = id;
  call_.driver = driver;
  if (call_depth++ == 0) correlation_of_call = next_correlation++;
  call_.correlation = correlation_of_call;
  const Profiler* profiler = the_profiler.load();
  if (!profiler || call_depth > 1) return;
  call_.start = now();
  profiler->call_begins(call_.correlation);
}

ApiCall::~ApiCall() {
  if (--call_depth > 0 || !call_.start) return;
  call_.end = now();
  call_.thread = static_cast<uint32_t>(syscall(SYS_gettid));
  the_profiler.load()->call_ended(call_);
}

}  // namespace simulation
