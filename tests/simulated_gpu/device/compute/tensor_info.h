// Tensors as torch's kernels over indices get them: an address, sizes and strides.
#pragma once

#include <vector>

#include "values.h"

namespace compute {

// torch's TensorInfo: an address, sizes and strides, and how many there are.
struct Tensor {
  char* at;
  std::vector<int64_t> sizes, strides;

  static Tensor of(const void* object) {
    constexpr int most = 25;
    auto* bytes = static_cast<const char*>(object);
    Tensor found{read<char*>(bytes), {}, {}};
    int dimensions = read<int>(bytes + 8 + 2 * 4 * most);
    for (int i = 0; i < dimensions; i++) {
      found.sizes.push_back(read<uint32_t>(bytes + 8 + 4 * i));
      found.strides.push_back(read<uint32_t>(bytes + 8 + 4 * (most + i)));
    }
    return found;
  }

  int64_t offset(int64_t index) const {
    int64_t found = 0;
    for (size_t i = sizes.size(); i-- > 0;) {
      found += index % sizes[i] * strides[i];
      index /= sizes[i];
    }
    return found;
  }
};

}  // namespace compute
