#include "engine.h"

#include <algorithm>
#include <cmath>

#include "faults.h"

namespace simulation {

Simulation& Simulation::get() {
  // Never destroyed: at the end of the process its threads still use it.
  static Simulation& once = *new Simulation;
  return once;
}

Simulation::Simulation() {
  for (int index = 0; index < settings().devices; index++) {
    auto* device = new Device(index);
    device->streams.push_back(&device->default_stream);
    devices_.push_back(device);
  }
}

Stream* Simulation::make_stream(int device, int priority, bool blocking) {
  auto* stream = new Stream(next_stream_, device, priority, blocking);
  next_stream_ += 4;
  devices_.at(device)->streams.push_back(stream);
  return stream;
}

void Simulation::push(Stream* stream, std::shared_ptr<Task> task) {
  if (!started_) {
    started_ = true;
    now_ = now();
    start_threads();
  }
  // First withdraw the promise to other ranks that nothing begins here, then look at the clock: a rank that reads the
  // promise after its own look at the clock cannot then be surprised by this task.
  if (horizon_) horizon_->store(std::min(horizon_->load(), now_));
  task->enqueued = std::max(now(), now_);
  stream->queue.push_back(std::move(task));
  stream->enqueued++;
  if (!stream->active) {
    stream->active = true;
    device(stream->device).active.push_back(stream);
    fed.notify_one();
  } else if (horizon_) {
    fed.notify_one();  // renew the promise
  }
}

// Starts what can start, and lets pass what takes no time, at the present of the simulation.
void Simulation::start_tasks(int64_t& next) {
  for (bool again = true; again;) {
    again = false;
    next = never;
    for (Device* device : devices_) {
      // By index: to finish what takes no time may make other streams active.
      for (size_t i = 0; i < device->active.size(); i++)
        while (start_next(*device->active[i], next)) again = true;
    }
  }
}

// Takes one task from the front of a stream, if it can begin; false if nothing more can happen there now.
bool Simulation::start_next(Stream& stream, int64_t& next) {
  if (stream.running || stream.queue.empty()) return false;
  std::shared_ptr<Task> task = stream.queue.front();
  bool waits_for_value = task->kind == Kind::value_wait;
  bool instant = task->kind == Kind::event_record || task->kind == Kind::event_wait || waits_for_value ||
                 task->kind == Kind::value_write;
  int64_t earliest = task->enqueued + (instant ? 0 : static_cast<int64_t>(settings().launch_ns));
  if (earliest > now_) {
    next = std::min(next, earliest);
    return false;
  }
  if (task->kind == Kind::event_wait && !task->moment->reached) return false;
  if (waits_for_value && static_cast<int32_t>(task->word->load() - task->value) < 0) return false;
  stream.queue.pop_front();
  if (instant) {
    pass(stream, task);
    return true;
  }
  task->start = now_;
  task->left_ns = task->alone_ns;
  stream.running = task;
  if (task->kind == Kind::kernel) passed(Point::kernel);
  if (task->kind == Kind::collective) passed(Point::collective);
  if (task->meeting) {
    task->meeting->arrive(now_);
    hand_over({[meeting = task->meeting] { meeting->publish(); }, nullptr, nullptr});
  }
  if (task->at_begin) hand_over({std::move(task->at_begin), nullptr, nullptr});
  if (task->kind == Kind::host_function) {
    hand_over({[this, task] {
                 task->effect();
                 std::lock_guard<std::mutex> held(lock);
                 task->returned = now();
                 fed.notify_one();
               },
               nullptr, nullptr});
  }
  return false;
}

void Simulation::pass(Stream& stream, std::shared_ptr<Task> task) {
  task->end = now_;
  steps_++;
  if (task->kind == Kind::event_record) {
    task->moment->reached = true;
    task->moment->time = now_;
  }
  if (task->kind == Kind::value_write) task->word->store(task->value);
  hand_over({nullptr, task, &stream});
}

void Simulation::forget_idle_streams() {
  for (Device* device : devices_) {
    auto idle = [](Stream* stream) {
      if (stream->running || !stream->queue.empty()) return false;
      stream->active = false;
      return true;
    };
    device->active.erase(std::remove_if(device->active.begin(), device->active.end(), idle), device->active.end());
  }
}

int64_t Simulation::meet() {
  int64_t limit = never;
  polls_ = false;
  for (Device* device : devices_) {
    for (Stream* stream : device->active) {
      Task* task = stream->running.get();
      if (!task || !task->meeting || task->met >= 0) continue;
      // The horizon first: a rank that arrives between the two looks is then seen by the second.
      int64_t horizon = task->meeting->horizon();
      int64_t met = task->meeting->met();
      if (met >= 0) {
        task->met = std::max(met, task->start);
        begin_transfer(*device, *task);
        continue;
      }
      polls_ = true;
      if (horizon != never)
        limit = std::min(limit, std::max(task->start, horizon) + static_cast<int64_t>(task->alone_ns));
    }
  }
  return limit;
}

// The ranks have met, perhaps some time ago: takes off what has been transferred since, at the rates of that time.
void Simulation::begin_transfer(Device& device, Task& task) {
  double transferred = 0;
  int64_t until = now_;
  for (auto rate = device.communication_rates.rbegin(); rate != device.communication_rates.rend(); ++rate) {
    if (until <= task.met) break;
    int64_t from = std::max(rate->first, task.met);
    if (from >= until) continue;
    transferred += static_cast<double>(until - from) * rate->second;
    until = from;
  }
  task.left_ns = std::max(0.0, task.alone_ns - transferred);
}

double Simulation::rate(const Device& device, const Task& task, const InFlight& present) {
  if (task.task_class == Class::communication) return present.compute ? 1 / settings().communication_slowdown : 1;
  if (task.task_class != Class::compute) return 1;
  double rate = device.power.clock();
  if (!present.communication) return rate;
  rate /= settings().compute_slowdown;
  if (settings().channels_take_multiprocessors && present.channels > 0) {
    // Those that channels hold are missing in each wave, but for as many as the kernel leaves free itself.
    int all = settings().multiprocessors, own = task.multiprocessors ? task.multiprocessors : all;
    rate *= waves(task, own) / waves(task, std::clamp(all - present.channels, 1, own));
  }
  return rate;
}

Simulation::InFlight Simulation::in_flight(const Device& device) {
  InFlight found;
  for (const Stream* stream : device.active) {
    if (!stream->running) continue;
    found.compute |= stream->running->task_class == Class::compute;
    found.communication |= stream->running->task_class == Class::communication;
    found.channels += stream->running->channels;
  }
  return found;
}

std::vector<Simulation::Running> Simulation::running(int64_t& next) {
  std::vector<Running> found;
  for (Device* device : devices_) {
    InFlight present = in_flight(*device);
    if (present.compute || present.communication) next = std::min(next, device->power.next_tick());
    double transfer_rate = present.compute ? 1 / settings().communication_slowdown : 1;
    auto& rates = device->communication_rates;
    if (rates.empty() || rates.back().second != transfer_rate) {
      rates.emplace_back(now_, transfer_rate);
      if (rates.size() > 65536) rates.pop_front();
    }
    for (Stream* stream : device->active) {
      Task* task = stream->running.get();
      if (!task || (task->meeting && task->met < 0))
        continue;              // the other ranks are not there, as far as is known here
      if (task->met > now_) {  // the last rank is ahead of this one's simulated time
        next = std::min(next, task->met);
        continue;
      }
      if (task->kind == Kind::host_function) {
        if (task->returned < 0) continue;
        task->left_ns = static_cast<double>(std::max<int64_t>(0, task->returned - now_));
      }
      double speed = rate(*device, *task, present);
      found.push_back({device, stream, speed});
      next = std::min(next, now_ + static_cast<int64_t>(std::ceil(task->left_ns / speed)));
    }
  }
  return found;
}

int64_t Simulation::advance() {
  if (!started_) return never;
  if (fault(Fault::device)) {  // lost: nothing runs any more
    polls_ = false;
    return never;
  }
  int64_t until = std::max(now(), now_);
  for (;;) {
    int64_t next;
    forget_idle_streams();
    start_tasks(next);
    int64_t limit = meet();
    std::vector<Running> tasks = running(next);
    int64_t to = std::max(now_, std::min({next, limit, until}));
    double passed = static_cast<double>(to - now_);
    for (Running& one : tasks) one.stream->running->left_ns -= passed * one.rate;
    for (Device* device : devices_) device->power.advance(to, in_flight(*device));
    now_ = to;
    bool ended = false;
    for (Running& one : tasks) {
      if (one.stream->running->left_ns >= 0.5) continue;
      finish(*one.device, *one.stream);
      ended = true;
    }
    if (ended || (to == next && to < until)) continue;
    if (horizon_) horizon_->store(std::max(now_, std::min(next, limit)));
    if (limit < until) return now_;  // waits for other ranks
    return next;
  }
}

void Simulation::finish(Device& device, Stream& stream) {
  std::shared_ptr<Task> task = std::move(stream.running);
  stream.running = nullptr;
  task->end = now_;
  steps_++;
  if (task->moment) {
    task->moment->reached = true;
    task->moment->time = now_;
  }
  log_task(*task, device.index, stream.id);
  tell_profiler(*task, device.index, stream.id);
  bool is_host_function = task->kind == Kind::host_function;
  hand_over({is_host_function ? nullptr : std::move(task->effect), task, &stream});
}

void Simulation::show(const Errand& errand) {
  if (!errand.task) return;
  if (errand.task->moment && errand.task->kind != Kind::event_wait) errand.task->moment->visible = true;
  errand.stream->visible++;
  visible.notify_all();
}

// Lets the worker do an errand, or does it here where that takes no time and nothing is before it.
void Simulation::hand_over(Errand errand) {
  bool small = !errand.work || (errand.task && !errand.task->meeting && errand.task->bytes <= 4096);
  if (!small || busy_ || !errands_.empty()) {
    errands_.push_back(std::move(errand));
    errands_fed_.notify_one();
    return;
  }
  if (errand.work) errand.work();
  show(errand);
}

void Simulation::run_errands() {
  std::unique_lock<std::mutex> held(lock);
  for (;;) {
    while (errands_.empty()) errands_fed_.wait(held);
    Errand errand = std::move(errands_.front());
    errands_.pop_front();
    if (errand.work) {
      busy_ = true;
      held.unlock();
      errand.work();
      held.lock();
      busy_ = false;
    }
    show(errand);
  }
}

}  // namespace simulation
