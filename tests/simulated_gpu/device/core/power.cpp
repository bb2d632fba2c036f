#include "power.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "engine.h"
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

double PowerModel::target(bool compute, bool communication) const {
  const Settings& s = settings();
  return s.idle_w + (compute ? s.compute_w * clock_ * clock_ * clock_ : 0) + (communication ? s.communication_w : 0);
}

int64_t PowerModel::next_tick() const {
  if (at_ < 0) return INT64_MAX;
  bool steady = clock_ == highest_clock(device_) && std::max(watts_, wanted_) <= limit_w(device_);
  return steady ? INT64_MAX : next_;
}

// Brings power to `time`, which is no later than the next tick that counts.
void PowerModel::go_on(int64_t time, double wanted) {
  if (past_.empty() || wanted != wanted_ || past_.back().clock != clock_) {
    past_.push_back({at_, watts_, joules_, wanted, clock_});
    while (past_.size() > 2 && past_[1].start < at_ - kept_ns) past_.pop_front();
  }
  wanted_ = wanted;
  State state = past_.back().at(time);
  watts_ = state.watts;
  joules_ = state.joules;
  at_ = time;
}

void PowerModel::advance(int64_t time, bool compute, bool communication) {
  if (settings().power_cap_w <= 0) return;
  if (at_ < 0) {
    at_ = time;
    watts_ = settings().idle_w;
    next_ = time + tick_ns;
  }
  while (at_ < time) {
    double wanted = target(compute, communication), highest = highest_clock(device_), limit = limit_w(device_);
    if (clock_ == highest && std::max(watts_, wanted) <= limit) {
      go_on(time, wanted);
      if (next_ <= time) next_ += ((time - next_) / tick_ns + 1) * tick_ns;
      return;
    }
    go_on(std::min(time, next_), wanted);
    if (at_ == next_) {
      clock_ = std::clamp(clock_ + (watts_ > limit ? -clock_step : clock_step), least_clock, highest);
      next_ += tick_ns;
    }
  }
}

PowerModel::State PowerModel::Segment::at(int64_t time) const {
  double passed_s = 1e-9 * static_cast<double>(time - start), constant_s = 1e-9 * settings().power_constant_ns;
  double left = std::exp(-passed_s / constant_s);
  return {wanted + (watts - wanted) * left, joules + wanted * passed_s + (watts - wanted) * constant_s * (1 - left),
          clock};
}

PowerModel::State PowerModel::at(int64_t time) const {
  auto later = std::upper_bound(past_.begin(), past_.end(), time,
                                [](int64_t moment, const Segment& segment) { return moment < segment.start; });
  if (later != past_.begin()) return std::prev(later)->at(time);
  return {settings().idle_w, 0, 1};
}

}  // namespace simulation

// What the scripted NVML of tests/instruments/power/fakes asks of this device. Times are seconds of CLOCK_MONOTONIC.
extern "C" {

EXPORTED void simulated_power(int device, double at_s, double* watts, double* joules, double* clock) {
  using namespace simulation;
  Simulation& simulation = Simulation::get();
  std::lock_guard<std::mutex> held(simulation.lock);
  simulation.advance();
  PowerModel::State state = simulation.device(device).power.at(static_cast<int64_t>(1e9 * at_s));
  *watts = state.watts;
  *joules = state.joules;
  *clock = state.clock;
}

EXPORTED double simulated_limit_w(int device) { return simulation::limit_w(device); }
EXPORTED unsigned long long simulated_memory_bytes() { return simulation::settings().memory_bytes; }
EXPORTED int simulated_devices() { return simulation::settings().devices; }

EXPORTED const char* simulated_limits_file() {
  (void)&simulation::limits();  // makes it
  static const std::string& once = *new std::string(simulation::limits_file());
  return once.c_str();
}

}  // extern "C"
