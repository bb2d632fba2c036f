#include "power.h"

#include <algorithm>
#include <cmath>

#include "settings.h"

namespace simulation {
namespace {

constexpr int64_t tick_ns = 1'000'000;
constexpr double clock_step = 0.0075;  // 15 MHz of 1980
constexpr double least_clock = 0.17;

}  // namespace

double PowerModel::target(bool compute, bool communication) const {
  const Settings& s = settings();
  return s.idle_w + (compute ? s.compute_w * clock_ * clock_ * clock_ : 0) + (communication ? s.communication_w : 0);
}

void PowerModel::advance(int64_t time, bool compute, bool communication) {
  const Settings& s = settings();
  if (s.power_cap_w <= 0) return;
  if (at_ < 0) {
    at_ = time;
    watts_ = s.idle_w;
    next_ = time + tick_ns;
  }
  // After a long idle time nothing of what was before is left: the ticks between need not be walked.
  if (time - at_ > 1000 * tick_ns && !compute && !communication) {
    at_ = time;
    watts_ = s.idle_w;
    clock_ = 1;
    next_ = time + tick_ns;
    return;
  }
  while (at_ < time) {
    int64_t to = std::min(time, next_);
    double wanted = target(compute, communication);
    watts_ = wanted + (watts_ - wanted) * std::exp(-static_cast<double>(to - at_) / s.power_constant_ns);
    at_ = to;
    if (to == next_) {
      clock_ = std::clamp(clock_ + (watts_ > s.power_cap_w ? -clock_step : clock_step), least_clock, 1.0);
      next_ += tick_ns;
    }
  }
}

}  // namespace simulation
