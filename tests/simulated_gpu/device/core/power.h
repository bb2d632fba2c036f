// Power, and the clock that it allows.
#pragma once

#include <cstdint>
#include <deque>

namespace simulation {

// First-order model: the power drawn follows what runs with a time constant. Where its average is above the limit, the
// clock falls by a step at each tick; below it rises again. Compute draws by the cube of the clock, since voltage falls
// with it, and takes time by its inverse. Without a cap there is no model: the clock is always full.
class PowerModel {
 public:
  struct State {
    double watts = 0, joules = 0, clock = 1;
  };

  explicit PowerModel(int device) : device_(device) {}
  double clock() const { return clock_; }  // share of the full clock
  double watts() const { return watts_; }
  double joules() const { return joules_; }  // since the model began
  // When the clock may change next, if what runs stays as it is; INT64_MAX if it stays.
  int64_t next_tick() const;
  // Brings the model to `time`, given what ran since the last call.
  void advance(int64_t time, bool compute, bool communication);
  // What held at a time of the last seconds; joules since the model began.
  State at(int64_t time) const;

 private:
  // From its start on power goes to the wanted one, at the same clock.
  struct Segment {
    int64_t start;
    double watts, joules, wanted, clock;
    State at(int64_t time) const;
  };
  double target(bool compute, bool communication) const;
  void go_on(int64_t time, double wanted);

  int device_;
  double clock_ = 1, watts_ = 0, joules_ = 0, wanted_ = 0;
  int64_t at_ = -1, next_ = INT64_MAX;
  std::deque<Segment> past_;
};

// Limits of the devices, which all processes of a folder share: whoever sets one there limits the device.
struct Limits {
  static constexpr int most_devices = 16;
  double limit_w[most_devices];     // 0: the cap of the settings
  double locked_mhz[most_devices];  // 0: not locked
};
const volatile Limits& limits();

}  // namespace simulation
