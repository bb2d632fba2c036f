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
  // Memory and multiprocessors: seconds for which they were in use, since the model began.
  struct State {
    double watts = 0, joules = 0, clock = 1, memory_s = 0, multiprocessors_s = 0;
  };
  // What runs, and how many multiprocessors a collective takes.
  struct Load {
    bool compute = false, communication = false;
    int channels = 0;
  };

  explicit PowerModel(int device) : device_(device) {}
  double clock() const { return clock_; }  // share of the full clock
  const State& state() const { return state_; }
  // When the clock may change next, if what runs stays as it is; INT64_MAX if it stays.
  int64_t next_tick() const;
  // Brings the model to `time`, given what ran since the last call.
  void advance(int64_t time, const Load& load);
  // What held at a time of the last seconds; joules since the model began.
  State at(int64_t time) const;

 private:
  // What is drawn and in use while the same runs at the same clock.
  struct Rates {
    double watts = 0, memory = 0, multiprocessors = 0;
    bool operator!=(const Rates& other) const {
      return watts != other.watts || memory != other.memory || multiprocessors != other.multiprocessors;
    }
  };
  // From its start on power goes to that of the rates.
  struct Segment {
    int64_t start;
    State first;
    Rates rates;
    State at(int64_t time) const;
  };
  Rates rates(const Load& load) const;
  void go_on(int64_t time, const Rates& rates);

  int device_;
  double clock_ = 1;
  State state_;
  Rates rates_;
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
