#include "power.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "engine.h"
#include "faults.h"
#include "settings.h"

namespace simulation {
namespace {

constexpr int64_t tick_ns = 1'000'000, kept_ns = 5'000'000'000;
constexpr double full_clock_mhz = 1980, clock_step = 15 / full_clock_mhz, least_clock = 0.17;
constexpr int state_bytes = 4096;  // whoever else keeps something in the file of limits has room

double limit_w(int device) {
  double set = limits().limit_w[device];
  return set > 0 ? set : settings().power_cap_w;
}

double highest_clock(int device) {
  double locked = limits().locked_mhz[device];
  return locked > 0 ? std::min(1.0, locked / full_clock_mhz) : 1.0;
}

std::string limits_file() { return settings().folder + "/limits"; }

}  // namespace

const volatile Limits& limits() {
  static const volatile Limits& once = *[] {
    int file = open(limits_file().c_str(), O_RDWR | O_CREAT, 0600);
    void* shared = MAP_FAILED;
    if (file >= 0 && ftruncate(file, state_bytes) == 0)
      shared = mmap(nullptr, sizeof(Limits), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (shared == MAP_FAILED) {
      perror("[simulated GPU] limits");
      abort();
    }
    close(file);
    return static_cast<const volatile Limits*>(shared);
  }();
  return once;
}

PowerModel::Rates PowerModel::rates(const Load& load) const {
  const Settings& s = settings();
  double watts = s.idle_w + (load.compute ? s.compute_w * clock_ * clock_ * clock_ : 0) +
                 (load.communication ? s.communication_w : 0);
  double memory = (load.compute ? s.compute_memory : 0) + (load.communication ? s.communication_memory : 0);
  double multiprocessors = load.compute ? 1 : static_cast<double>(load.channels) / s.multiprocessors;
  return {watts, std::min(1.0, memory), std::min(1.0, multiprocessors)};
}

int64_t PowerModel::next_tick() const {
  if (at_ < 0) return INT64_MAX;
  bool steady = clock_ == highest_clock(device_) && std::max(state_.watts, rates_.watts) <= limit_w(device_);
  return steady ? INT64_MAX : next_;
}

// Brings the model to `time`, which is no later than the next tick that counts.
void PowerModel::go_on(int64_t time, const Rates& rates) {
  if (past_.empty() || rates != rates_ || past_.back().first.clock != clock_) {
    state_.clock = clock_;
    past_.push_back({at_, state_, rates});
    while (past_.size() > 2 && past_[1].start < at_ - kept_ns) past_.pop_front();
  }
  rates_ = rates;
  state_ = past_.back().at(time);
  at_ = time;
}

void PowerModel::advance(int64_t time, const Load& load) {
  if (settings().power_cap_w <= 0) return;
  if (at_ < 0) {
    at_ = time;
    state_.watts = settings().idle_w;
    next_ = time + tick_ns;
  }
  while (at_ < time) {
    Rates wanted = rates(load);
    double highest = highest_clock(device_), limit = limit_w(device_);
    if (clock_ == highest && std::max(state_.watts, wanted.watts) <= limit) {
      go_on(time, wanted);
      if (next_ <= time) next_ += ((time - next_) / tick_ns + 1) * tick_ns;
      return;
    }
    go_on(std::min(time, next_), wanted);
    if (at_ == next_) {
      clock_ = std::clamp(clock_ + (state_.watts > limit ? -clock_step : clock_step), least_clock, highest);
      next_ += tick_ns;
    }
  }
}

PowerModel::State PowerModel::Segment::at(int64_t time) const {
  double passed_s = 1e-9 * static_cast<double>(time - start), constant_s = 1e-9 * settings().power_constant_ns;
  double left = std::exp(-passed_s / constant_s), beyond_w = first.watts - rates.watts;
  return {rates.watts + beyond_w * left,
          first.joules + rates.watts * passed_s + beyond_w * constant_s * (1 - left),
          first.clock,
          first.memory_s + rates.memory * passed_s,
          first.multiprocessors_s + rates.multiprocessors * passed_s};
}

PowerModel::State PowerModel::at(int64_t time) const {
  auto later = std::upper_bound(past_.begin(), past_.end(), time,
                                [](int64_t moment, const Segment& segment) { return moment < segment.start; });
  if (later != past_.begin()) return std::prev(later)->at(time);
  return {settings().idle_w};
}

}  // namespace simulation

// What the scripted NVML of tests/instruments/power/fakes asks of this device. Times are seconds of CLOCK_MONOTONIC.
extern "C" {

static simulation::PowerModel::State state_at(int device, double at_s) {
  using namespace simulation;
  Simulation& simulation = Simulation::get();
  std::lock_guard<std::mutex> held(simulation.lock);
  simulation.advance();
  return simulation.device(device).power.at(static_cast<int64_t>(1e9 * at_s));
}

EXPORTED void simulated_power(int device, double at_s, double* watts, double* joules, double* clock) {
  simulation::PowerModel::State state = state_at(device, at_s);
  *watts = state.watts;
  *joules = state.joules;
  *clock = state.clock;
}

EXPORTED void simulated_parts(int device, double at_s, double* memory_s, double* multiprocessors_s) {
  simulation::PowerModel::State state = state_at(device, at_s);
  *memory_s = state.memory_s;
  *multiprocessors_s = state.multiprocessors_s;
}

EXPORTED double simulated_limit_w(int device) { return simulation::limit_w(device); }
EXPORTED unsigned long long simulated_memory_bytes() { return simulation::settings().memory_bytes; }
EXPORTED int simulated_fault() { return simulation::fault(simulation::Fault::sensors); }
EXPORTED int simulated_devices() { return simulation::settings().devices; }

EXPORTED const char* simulated_limits_file() {
  (void)&simulation::limits();  // makes it
  static const std::string& once = *new std::string(simulation::limits_file());
  return once.c_str();
}

}  // extern "C"
