// Power, and the clock that it allows.
#pragma once

#include <cstdint>

namespace simulation {

// First-order model: the power drawn follows what runs with a time constant. Where its average is above the cap, the
// clock falls by a step at each tick; below the cap it rises again. Compute draws by the cube of the clock, since
// voltage falls with it, and takes time by its inverse. Without a cap the clock is always full.
class PowerModel {
 public:
  double clock() const { return clock_; }  // share of the full clock
  double watts() const { return watts_; }
  // When the model must be asked again; INT64_MAX without a cap.
  int64_t next_tick() const { return next_; }
  // Brings the model to `time`, given what ran since the last call.
  void advance(int64_t time, bool compute, bool communication);

 private:
  double target(bool compute, bool communication) const;
  double clock_ = 1, watts_ = 0;
  int64_t at_ = -1, next_ = INT64_MAX;
};

}  // namespace simulation
