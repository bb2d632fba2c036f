// Tensors put together and taken apart: torch.cat, and what FSDP2 copies into and out of its collectives with.
#include <algorithm>
#include <set>

#include "compute.h"

namespace compute {
namespace {

// The inputs' elements in their order, wherever they lie: `shape` and `strides` are of one input.
struct Scattered {
  char* from;
  int64_t to, count;  // where the first goes, in elements
  std::vector<int64_t> sizes, strides;
};

// torch.cat of tensors with strides; element by element.
Work cat_scattered(const Launch& launch, int64_t width, int64_t most, int dimensions) {
  char* to = launch.address(0);
  auto* addresses = static_cast<const char*>(launch.arguments[1]);
  const char* offsets = addresses + most * 8;
  const char* are_contiguous = offsets + 12 * most;
  const char* shapes = are_contiguous + most;
  auto* shape = static_cast<const char*>(launch.arguments[2]);
  int dimension = launch.argument<int>(3);
  int64_t stride = launch.argument<uint32_t>(4);
  constexpr int64_t most_dimensions = 4;
  std::vector<int64_t> result_strides;
  for (int i = 0; i < dimensions; i++) result_strides.push_back(read<uint32_t>(shape + 4 * (most_dimensions + i)));
  std::vector<Scattered> inputs;
  for (int64_t k = 0; k < std::min<int64_t>(launch.grid.y, most); k++) {
    Scattered input{read<char*>(addresses + 8 * k), read<uint32_t>(offsets + 4 * k) * stride,
                    read<uint32_t>(offsets + 8 * most + 4 * k), {}, std::vector<int64_t>(dimensions, 1)};
    for (int i = 0; i < dimensions; i++)
      input.sizes.push_back(read<uint32_t>(i == dimension ? offsets + 4 * (most + k) : shape + 4 * i));
    bool contiguous = read<bool>(are_contiguous + k);
    for (int i = dimensions - 1; i >= 0; i--) {
      if (!contiguous) input.strides[i] = read<uint32_t>(shapes + 4 * (2 * most_dimensions * k + most_dimensions + i));
      else if (i + 1 < dimensions) input.strides[i] = input.strides[i + 1] * input.sizes[i + 1];
    }
    inputs.push_back(input);
  }
  return [=](Writes& writes) {
    for (const Scattered& input : inputs) {
      for (int64_t element = 0; element < input.count; element++) {
        int64_t left = element, from = 0, target = input.to;
        for (int i = dimensions - 1; i >= 0; i--) {
          int64_t place = left % input.sizes[i];
          left /= input.sizes[i];
          from += place * input.strides[i];
          target += place * result_strides[i];
        }
        writes.put(to + target * width, input.from + from * width, width);
      }
    }
  };
}

// Result, then arrays of addresses, offsets, sizes along the dimension and numbers of elements, then the result's shape
// and the dimension.
Work cat(const Launch& launch) {
  const std::vector<std::string>& given = launch.parts.arguments;
  if (given.size() < 4 || given[1] != "unsigned int") return {};
  size_t width = strtoul(given[0].c_str() + given[0].find('<') + 1, nullptr, 10);
  size_t most = strtoul(given[3].c_str(), nullptr, 10);
  int dimensions = atoi(given[2].c_str()), dimension = launch.argument<int>(3);
  if (!width || !most || dimension >= dimensions) return {};
  if (launch.parts.base == "CatArrayBatchedCopy")
    return cat_scattered(launch, static_cast<int64_t>(width), static_cast<int64_t>(most), dimensions);
  char* to = launch.address(0);
  auto* addresses = static_cast<const char*>(launch.arguments[1]);
  const char* offsets = addresses + most * sizeof(char*);
  const char* sizes = offsets + 4 * most;
  const char* counts = sizes + 4 * most;
  auto* shape = static_cast<const char*>(launch.arguments[2]);
  int64_t outer = 1;
  for (int i = 0; i < dimension; i++) outer *= read<uint32_t>(shape + 4 * i);
  struct Part {
    char* from;
    int64_t at, size;
  };
  std::vector<Part> parts;
  int64_t row = 0;
  unsigned inputs = std::min<unsigned>(launch.grid.y, static_cast<unsigned>(most));
  for (unsigned i = 0; i < inputs; i++) {
    int64_t count = read<uint32_t>(counts + 4 * i), size = read<uint32_t>(sizes + 4 * i);
    if (count == 0) continue;
    if (count % (outer * size)) return {};
    int64_t block = count / outer * static_cast<int64_t>(width);
    parts.push_back({read<char*>(addresses + 8 * i), read<uint32_t>(offsets + 4 * i) * (block / size), block});
    row += block;
  }
  // One launch has all inputs of a row, or there is one row.
  if (outer > 1 && (parts.empty() || parts[0].at != 0 || inputs == most)) return {};
  return [=](Writes& writes) {
    for (int64_t i = 0; i < outer; i++)
      for (const Part& part : parts) writes.put(to + i * row + part.at, part.from + i * part.size, part.size);
  };
}

// Addresses of results and sources, bytes of a chunk of each, which of them a block works on, the source's row.
Work split(const Launch& launch) {
  char *targets = launch.address(0), *sources = launch.address(1), *sizes = launch.address(2);
  char* which = launch.address(3);
  int64_t stride = launch.argument<int64_t>(5), chunks = launch.argument<int64_t>(6);
  int64_t blocks = launch.grid.x;
  return [=](Writes& writes) {
    std::set<int64_t> seen;
    for (int64_t block = 0; block < blocks; block++) {
      auto part = read<int64_t>(which + 8 * block);
      if (!seen.insert(part).second) continue;
      auto size = read<int64_t>(sizes + 8 * part);
      char *to = read<char*>(targets + 8 * part), *from = read<char*>(sources + 8 * part);
      for (int64_t i = 0; i < chunks; i++) writes.put(to + i * size, from + i * stride, size);
    }
  };
}

// The reverse, with padding and perhaps to a type twice as wide.
Work chunk_cat(const Launch& launch) {
  bool casts = launch.parts.arguments[0] != launch.parts.arguments[1];
  auto to_type = type_named(launch.parts.arguments[0]), from_type = type_named(launch.parts.arguments[1]);
  if (casts && (!to_type || !from_type)) return {};
  char *sources = launch.address(0), *to = launch.address(1), *which = launch.address(2), *starts = launch.address(3);
  char *actual_sizes = launch.address(5), *padded_sizes = launch.address(6);
  int64_t slice_bytes = launch.argument<int64_t>(8), chunk_bytes = launch.argument<int64_t>(9);
  int64_t ratio = launch.argument<int64_t>(10), blocks = launch.grid.x, chunks = launch.grid.y, slices = launch.grid.z;
  return [=](Writes& writes) {
    std::set<int64_t> seen;
    for (int64_t block = 0; block < blocks; block++) {
      auto part = read<int64_t>(which + 8 * block);
      if (!seen.insert(part).second) continue;
      auto actual = read<int64_t>(actual_sizes + 8 * part), padded = read<int64_t>(padded_sizes + 8 * part);
      char* from = read<char*>(sources + 8 * part);
      int64_t start = read<int64_t>(starts + 8 * part), taken = padded / ratio;
      for (int64_t slice = 0; slice < slices; slice++) {
        for (int64_t chunk = 0; chunk < chunks; chunk++) {
          int64_t size = std::clamp<int64_t>(actual - chunk * taken, 0, taken);
          const char* source = from + slice * actual + chunk * taken;
          char* target = to + slice * slice_bytes + chunk * chunk_bytes + start;
          std::vector<char> bytes(padded, 0);
          if (casts) {
            auto width = static_cast<int64_t>(width_of(*from_type)), wider = static_cast<int64_t>(width_of(*to_type));
            for (int64_t i = 0; i < size / width; i++)
              store(*to_type, &bytes[i * wider], load(*from_type, source + i * width));
          } else {
            std::copy(source, source + size, bytes.begin());
          }
          writes.put(target, bytes.data(), bytes.size());
        }
      }
    }
  };
}

// torch.arange: how many, the function with the first number and the step, the result.
Work range(const Launch& launch) {
  if (launch.name.find("arange_cuda_out") == std::string::npos) return {};
  // The type is told by which of the function's inner lambdas it is.
  static const Type types[] = {Type::uint8,   Type::int8,    Type::int32, Type::int64,   Type::int16,
                               Type::float64, Type::float32, Type::half,  Type::bfloat16};
  size_t inner = launch.name.find("const::{lambda()#");
  int which = inner == std::string::npos ? 0 : atoi(launch.name.c_str() + inner + 17);
  if (which < 1 || which > 9) return {};
  Type type = types[which - 1], number = which > 5 ? wide(type) : Type::int64;
  int64_t count = launch.parts.arguments[0] == "int" ? launch.argument<int>(0) : launch.argument<int64_t>(0);
  auto* members = static_cast<const char*>(launch.arguments[1]);
  double first = load(number, members), step = load(number, members + width_of(number));
  char* to = launch.address(2);
  return [=](Writes& writes) {
    for (int64_t i = 0; i < count; i++)
      writes.put(to + i * static_cast<int64_t>(width_of(type)), type, first + step * static_cast<double>(i));
  };
}

// torch.roll: source, result, how many, the dimension, from where on it is read, its size and its stride.
Work roll(const Launch& launch) {
  auto type = type_named(launch.parts.arguments[0]);
  if (!type) return {};
  char *from = launch.address(0), *to = launch.address(1);
  int64_t count = launch.argument<int64_t>(2), start = launch.argument<int64_t>(4);
  int64_t size = launch.argument<int64_t>(5), stride = launch.argument<int64_t>(6);
  return [=](Writes& writes) {
    auto width = static_cast<int64_t>(width_of(*type));
    for (int64_t i = 0; i < count; i++) {
      int64_t place = i / stride % size, source = i + ((place + start) % size - place) * stride;
      writes.put(to + i * width, from + source * width, width);
    }
  };
}

// torch.cumsum along the last dimension: result, source, rows and the size of one.
Work running_sum(const Launch& launch) {
  auto type = type_named(launch.parts.arguments[0]);
  if (!type || launch.parts.arguments[1].find("plus<") == std::string::npos) return {};
  char *to = launch.address(0), *from = launch.address(1);
  int64_t rows = launch.argument<uint32_t>(2), size = launch.argument<uint32_t>(3);
  return [=](Writes& writes) {
    auto width = static_cast<int64_t>(width_of(*type));
    for (int64_t row = 0; row < rows; row++) {
      double sum = 0;
      for (int64_t i = row * size; i < (row + 1) * size; i++) {
        sum += load(*type, from + i * width);
        writes.put(to + i * width, *type, sum);
      }
    }
  };
}

}  // namespace

Work placement(const Launch& launch) {
  const std::string& base = launch.parts.base;
  if (!base.compare(0, 19, "CatArrayBatchedCopy")) return cat(launch);
  if (base == "split_with_sizes_copy_out_contiguous_no_cast_kernel") return split(launch);
  if (base == "chunk_cat_cuda_kernel") return chunk_cat(launch);
  if (base == "elementwise_kernel_with_index") return range(launch);
  if (base == "roll_cuda_kernel") return roll(launch);
  if (base == "tensor_kernel_scan_innermost_dim") return running_sum(launch);
  return {};
}

}  // namespace compute
