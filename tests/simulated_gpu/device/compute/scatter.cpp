// Gather, scatter and sums at indices; sorting and the greatest elements of rows.
#include <algorithm>
#include <map>
#include <numeric>

#include "compute.h"
#include "offsets.h"
#include "tensor_info.h"

namespace compute {
namespace {

// Sums at places that may be the same.
class Sums {
 public:
  explicit Sums(Type type) : type_(type) {}
  void add(char* to, double value) {
    auto [entry, is_new] = found_.try_emplace(to, 0.0);
    if (is_new) entry->second = load(type_, to);
    entry->second += value;
  }
  void put(Writes& writes) const {
    for (auto& [to, sum] : found_) writes.put(to, type_, sum);
  }

 private:
  Type type_;
  std::map<char*, double> found_;
};

// torch's lambda: offsets of the result, the source and the indices, the indices' address, the size of the dimension,
// what is done (a byte), the result's address, the dimension's stride in elements, a number, and the source's address
// or the one number that is written.
Work gather_or_scatter(const Launch& launch) {
  std::vector<std::string> moves = arguments_of("_cuda_scatter_gather_internal_kernel", launch.name);
  std::vector<std::string> fills = arguments_of("_cuda_scatter_fill_internal_kernel", launch.name);
  bool gathers = !moves.empty() && moves[0] == "false";
  if (moves.empty() == fills.empty() || (moves.empty() ? fills[1] : moves[2]) != "long") return {};
  auto type = type_named(moves.empty() ? fills[0] : moves[1]);
  bool adds = launch.name.find("operator()<ReduceAdd>") != std::string::npos;
  if (!type || (!adds && launch.name.find("operator()<TensorAssign>") == std::string::npos)) return {};
  int tensors = moves.empty() ? 2 : 3;
  auto* object = static_cast<const char*>(launch.arguments[1]);
  const char* members = object + (Offsets::size_of(tensors) + 7) / 8 * 8;
  auto *indices = read<char*>(members), *to = read<char*>(members + 24);
  auto stride = read<int64_t>(members + 32);
  auto width = static_cast<int64_t>(width_of(*type));
  auto* from = moves.empty() ? nullptr : read<char*>(members + 48);
  std::vector<char> number(members + 48, members + 48 + width);
  Offsets offsets = Offsets::of(object, tensors);
  int count = launch.argument<int>(0);
  return [=](Writes& writes) {
    Sums sums(*type);
    for (int i = 0; i < count; i++) {
      int64_t at[Offsets::most];
      offsets.at(i, at);
      int64_t moved = read<int64_t>(indices + at[tensors - 1]) * stride * width;
      char* target = to + at[0] + (gathers ? 0 : moved);
      const char* source = from ? from + at[1] + (gathers ? moved : 0) : number.data();
      if (adds) sums.add(target, load(*type, source));
      else writes.put(target, source, width);
    }
    sums.put(writes);
  };
}

// torch.index_add: result, source, indices, the dimension of both, the elements of a slice, and behind what is done
// (a byte) a factor.
Work add_at(const Launch& launch) {
  bool small = launch.parts.base == "indexFuncSmallIndex";
  const std::vector<std::string>& given = launch.parts.arguments;
  auto type = type_named(given[0]);
  if (!type || given[1] != "long" || given[2] != "unsigned int" || given.back().find("ReduceAdd") == std::string::npos)
    return {};
  Tensor to = Tensor::of(launch.arguments[0]), from = Tensor::of(launch.arguments[1]);
  Tensor indices = Tensor::of(launch.arguments[2]);
  int to_dimension = launch.argument<int>(3), from_dimension = launch.argument<int>(4);
  int64_t inner = launch.argument<uint32_t>(small ? 5 : 6);
  double factor = load(*type, launch.arguments[small ? 9 : 10]);
  return [=](Writes& writes) {
    auto width = static_cast<int64_t>(width_of(*type));
    int64_t count = std::accumulate(indices.sizes.begin(), indices.sizes.end(), int64_t{1}, std::multiplies<>());
    Sums sums(*type);
    for (int64_t i = 0; i < count; i++) {
      auto row = read<int64_t>(indices.at + indices.offset(i) * 8);
      for (int64_t k = 0; k < inner; k++) {
        char* source = from.at + (from.offset(k) + i * from.strides[from_dimension]) * width;
        sums.add(to.at + (to.offset(k) + row * to.strides[to_dimension]) * width, factor * load(*type, source));
      }
    }
    sums.put(writes);
  };
}

// torch.scatter_add of whole rows: result, source, indices, how many, a row's elements, the result's rows, and the
// distances of rows.
Work add_rows(const Launch& launch) {
  auto type = type_named(launch.parts.arguments[0]);
  if (!type || launch.parts.arguments[1] != "long") return {};
  char *to = launch.address(0), *from = launch.address(1), *indices = launch.address(2);
  int count = launch.argument<int>(3), size = launch.argument<int>(4);
  int64_t to_stride = launch.argument<int64_t>(6), from_stride = launch.argument<int64_t>(7);
  return [=](Writes& writes) {
    auto width = static_cast<int64_t>(width_of(*type));
    Sums sums(*type);
    for (int i = 0; i < count; i++) {
      auto row = read<int64_t>(indices + 8 * i);
      for (int k = 0; k < size; k++)
        sums.add(to + (row * to_stride + k) * width, load(*type, from + (i * from_stride + k) * width));
    }
    sums.put(writes);
  };
}

// A row of keys, `stride` elements apart.
std::vector<double> keys_of(const Tensor& tensor, Type type, int64_t row, int64_t count, int64_t stride) {
  auto width = static_cast<int64_t>(width_of(type));
  std::vector<double> found(count);
  load_many(type, tensor.at + tensor.offset(row) * width, stride * width, static_cast<int>(count), found.data());
  return found;
}

// The places of elements in their order; equal ones in that of their places.
std::vector<int64_t> order_of(const std::vector<double>& keys, bool falling) {
  std::vector<int64_t> found(keys.size());
  std::iota(found.begin(), found.end(), 0);
  std::stable_sort(found.begin(), found.end(),
                   [&](int64_t a, int64_t b) { return falling ? keys[a] > keys[b] : keys[a] < keys[b]; });
  return found;
}

// The greatest or least of each row, in no order: source, its row's size, how many, whether the greatest, rows, the
// distance of elements, results and theirs, places and theirs.
Work extremes(const Launch& launch) {
  auto type = type_named(launch.parts.arguments[0]);
  if (!type || launch.parts.arguments[1] != "unsigned int") return {};
  Tensor from = Tensor::of(launch.arguments[0]), to = Tensor::of(launch.arguments[6]);
  Tensor places = Tensor::of(launch.arguments[8]);
  int64_t size = launch.argument<uint32_t>(1), count = launch.argument<uint32_t>(2);
  bool greatest = launch.argument<bool>(3);
  int64_t rows = launch.argument<uint32_t>(4), stride = launch.argument<uint32_t>(5);
  int64_t to_stride = launch.argument<uint32_t>(7), places_stride = launch.argument<uint32_t>(9);
  return [=](Writes& writes) {
    auto width = static_cast<int64_t>(width_of(*type));
    for (int64_t row = 0; row < rows; row++) {
      std::vector<double> keys = keys_of(from, *type, row, size, stride);
      std::vector<int64_t> order = order_of(keys, greatest);
      for (int64_t i = 0; i < count; i++) {
        writes.put(to.at + (to.offset(row) + i * to_stride) * width, *type, keys[order[i]]);
        writes.put(places.at + (places.offset(row) + i * places_stride) * 8, Type::int64,
                   static_cast<double>(order[i]));
      }
    }
  };
}

// Keys, rows, a row's size and distance of elements; then values and theirs, which go with the keys.
Work sort(const Launch& launch) {
  const std::vector<std::string>& given = launch.parts.arguments;
  auto type = type_named(given[4]), value_type = type_named(given[5]);
  if (!type || !value_type || given[7] != "unsigned int") return {};
  bool falling = given[6].find("GTOp") != std::string::npos;
  Tensor keys = Tensor::of(launch.arguments[0]), values = Tensor::of(launch.arguments[4]);
  int64_t rows = launch.argument<uint32_t>(1), size = launch.argument<uint32_t>(2);
  int64_t stride = launch.argument<uint32_t>(3), value_stride = launch.argument<uint32_t>(5);
  return [=](Writes& writes) {
    auto width = static_cast<int64_t>(width_of(*type)), value_width = static_cast<int64_t>(width_of(*value_type));
    for (int64_t row = 0; row < rows; row++) {
      std::vector<double> found = keys_of(keys, *type, row, size, stride);
      std::vector<double> moved = keys_of(values, *value_type, row, size, value_stride);
      std::vector<int64_t> order = order_of(found, falling);
      for (int64_t i = 0; i < size; i++) {
        writes.put(keys.at + (keys.offset(row) + i * stride) * width, *type, found[order[i]]);
        writes.put(values.at + (values.offset(row) + i * value_stride) * value_width, *value_type, moved[order[i]]);
      }
    }
  };
}

// How much of a mask is true before each element: CUB's scan of a mask, its result, and at the end how many.
Work counts_before(const Launch& launch) {
  if (launch.name.find("CountMaskOp") == std::string::npos) return {};
  char *mask = launch.address(0), *to = launch.address(1);
  int64_t count = launch.argument<uint32_t>(6);
  return [=](Writes& writes) {
    int64_t found = 0;
    for (int64_t i = 0; i < count; i++) {
      writes.put(to + 8 * i, &found, 8);
      found += read<uint8_t>(mask + i) != 0;
    }
  };
}

}  // namespace

Work scatter(const Launch& launch) {
  const std::string& base = launch.parts.base;
  if (base == "_scatter_gather_elementwise_kernel") return gather_or_scatter(launch);
  if (base == "indexFuncSmallIndex" || base == "indexFuncLargeIndex") return add_at(launch);
  if (base == "tma_scatter_add_kernel") return add_rows(launch);
  if (base == "gatherTopK") return extremes(launch);
  if (base == "bitonicSortKVInPlace") return sort(launch);
  if (base == "DeviceScanKernel") return counts_before(launch);
  // Counters of a scan, and a check of sizes.
  if (base == "DeviceScanInitKernel" || base == "masked_scatter_size_check") return [](Writes&) {};
  return {};
}

}  // namespace compute
