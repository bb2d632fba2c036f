// Rows that indices choose: torch's index_select, gather and embedding. An index that is out of bounds gives no number.
#include <cmath>
#include <map>

#include "compute.h"
#include "tensor_info.h"

namespace compute {
namespace {

Work index_select(const Launch& launch) {
  bool small = launch.parts.base == "indexSelectSmallIndex";
  auto type = type_named(launch.parts.arguments[0]), index = type_named(launch.parts.arguments[1]);
  if (!type || !index || launch.parts.arguments[2] != "unsigned int") return {};
  Tensor to = Tensor::of(launch.arguments[0]), from = Tensor::of(launch.arguments[1]);
  Tensor indices = Tensor::of(launch.arguments[2]);
  int to_dimension = launch.argument<int>(3), from_dimension = launch.argument<int>(4);
  int64_t inner = launch.argument<uint32_t>(small ? 5 : 6), limit = launch.argument<int64_t>(small ? 6 : 7);
  return [=](Writes& writes) {
    int64_t count = 1;
    for (int64_t size : indices.sizes) count *= size;
    auto width = static_cast<int64_t>(width_of(*type)), index_width = static_cast<int64_t>(width_of(*index));
    for (int64_t i = 0; i < count; i++) {
      auto row = static_cast<int64_t>(load(*index, indices.at + indices.offset(i) * index_width));
      for (int64_t k = 0; k < inner; k++) {
        char* target = to.at + (to.offset(k) + i * to.strides[to_dimension]) * width;
        if (row < 0 || row >= limit) writes.put(target, *type, NAN);
        else writes.put(target, from.at + (from.offset(k) + row * from.strides[from_dimension]) * width, width);
      }
    }
  };
}

// Rows of bytes: result, source, indices, their number, bytes of a row, rows, and the distances of rows.
Work gather(const Launch& launch) {
  auto index = type_named(launch.parts.arguments[1]);
  if (!index) return {};
  char *to = launch.address(0), *from = launch.address(1), *indices = launch.address(2);
  int count = launch.argument<int>(3);
  int64_t bytes = launch.argument<int64_t>(4), limit = launch.argument<int64_t>(5);
  int64_t from_stride = launch.argument<int64_t>(6), to_stride = launch.argument<int64_t>(7);
  return [=](Writes& writes) {
    const std::vector<char> none(bytes, char(-1));
    for (int i = 0; i < count; i++) {
      auto row = static_cast<int64_t>(load(*index, indices + i * static_cast<int64_t>(width_of(*index))));
      if (row < 0) row += limit;
      bool exists = row >= 0 && row < limit;
      writes.put(to + i * to_stride, exists ? from + row * from_stride : none.data(), bytes);
    }
  };
}

// Indices, gradients of the rows, the weight's gradient that is added to, how many, a row's elements, who is left out.
Work embedding_backward(const Launch& launch) {
  auto type = type_named(launch.parts.arguments[0]), index = type_named(launch.parts.arguments[2]);
  if (!type || !index) return {};
  char *indices = launch.address(0), *gradients = launch.address(1), *to = launch.address(2);
  int count = launch.argument<int>(3), padding = launch.argument<int>(5);
  int64_t length = launch.argument<int64_t>(4);
  return [=](Writes& writes) {
    std::map<int64_t, std::vector<double>> sums;
    auto width = static_cast<int64_t>(width_of(*type));
    for (int i = 0; i < count; i++) {
      auto row = static_cast<int64_t>(load(*index, indices + i * static_cast<int64_t>(width_of(*index))));
      if (row == padding || row < 0) continue;
      auto [entry, is_new] = sums.try_emplace(row, length);
      if (is_new)
        load_many(*type, to + row * length * width, width, static_cast<int>(length), entry->second.data());
      for (int64_t k = 0; k < length; k++)
        entry->second[k] += load(*type, gradients + (i * length + k) * width);
    }
    for (auto& [row, sum] : sums)
      for (int64_t k = 0; k < length; k++) writes.put(to + (row * length + k) * width, *type, sum[k]);
  };
}

// The upper or lower triangle: result, source, which diagonal.
Work triangle(const Launch& launch) {
  auto type = type_named(launch.parts.arguments[0]);
  if (!type || launch.parts.arguments[1] != "int") return {};
  bool upper = launch.parts.arguments[2] == "true";
  Tensor to = Tensor::of(launch.arguments[0]), from = Tensor::of(launch.arguments[1]);
  int64_t diagonal = launch.argument<int64_t>(2);
  if (to.sizes.size() < 2) return {};
  return [=](Writes& writes) {
    auto width = static_cast<int64_t>(width_of(*type));
    int64_t rows = to.sizes[to.sizes.size() - 2], columns = to.sizes.back(), count = 1;
    for (int64_t size : to.sizes) count *= size;
    for (int64_t i = 0; i < count; i++) {
      int64_t distance = i % columns - i / columns % rows;
      bool kept = upper ? distance >= diagonal : distance <= diagonal;
      char* target = to.at + to.offset(i) * width;
      if (kept) writes.put(target, from.at + from.offset(i) * width, width);
      else writes.put(target, *type, 0);
    }
  };
}

}  // namespace

Work rows(const Launch& launch) {
  const std::string& base = launch.parts.base;
  if (base == "indexSelectSmallIndex" || base == "indexSelectLargeIndex") return index_select(launch);
  if (base == "vectorized_gather_kernel") return gather(launch);
  if (base == "embedding_backward_feature_kernel") return embedding_backward(launch);
  if (base == "triu_tril_kernel") return triangle(launch);
  return {};
}

}  // namespace compute
