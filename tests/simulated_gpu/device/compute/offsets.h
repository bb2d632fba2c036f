// Where the elements of tensors with strides are: torch's OffsetCalculator.
#pragma once

#include <cstdint>
#include <vector>

#include "values.h"

namespace compute {

class Offsets {
 public:
  static constexpr int most = 8;  // tensors

  static constexpr int most_dimensions = 25;
  // Its bytes: the number of dimensions, then three numbers for each size, then strides.
  static constexpr size_t size_of(int tensors) { return 4 + most_dimensions * (12 + 4 * tensors); }

  static Offsets of(const char* object, int tensors) {
    Offsets found;
    found.tensors_ = tensors;
    int dimensions = read<int>(object);
    const char* strides = object + 4 + most_dimensions * 12;
    for (int i = 0; i < dimensions; i++) {
      found.sizes_.push_back(read<uint32_t>(object + 4 + 12 * i));
      for (int k = 0; k < tensors; k++) found.strides_.push_back(read<int32_t>(strides + 4 * (i * tensors + k)));
    }
    return found;
  }

  // Nothing but one element after another.
  bool are_trivial() const { return tensors_ == 0; }

  void at(int64_t index, int64_t* offsets) const {
    for (int k = 0; k < tensors_; k++) offsets[k] = 0;
    for (size_t i = 0; i < sizes_.size(); i++) {
      int64_t place = index % sizes_[i];
      index /= sizes_[i];
      for (int k = 0; k < tensors_; k++) offsets[k] += place * strides_[i * tensors_ + k];
    }
  }

 private:
  int tensors_ = 0;
  std::vector<int64_t> sizes_, strides_;
};

}  // namespace compute
