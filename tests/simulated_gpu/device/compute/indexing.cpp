// Elements that tensors of indices choose: reading and writing by indices, gather and scatter.
#include "compute.h"
#include "offsets.h"

namespace compute {
namespace {

constexpr int most_indices = Offsets::most_dimensions;

// torch's lambda: offsets of the result, the source and the indices, the first two's addresses, how many indices there
// are, and by index: address, size, stride in bytes.
struct Indexed {
  Offsets offsets;
  char *to, *from;
  struct Index {
    char* at;
    int64_t size, stride;
  };
  std::vector<Index> indices;

  static std::optional<Indexed> of(const char* object) {
    const char* members = object + (Offsets::size_of(3) + 7) / 8 * 8;
    auto count = read<uint64_t>(members + 16);
    if (count > most_indices) return {};
    Indexed found{Offsets::of(object, 3), read<char*>(members), read<char*>(members + 8), {}};
    const char* arrays = members + 24;
    constexpr size_t size = 8 * most_indices;
    for (uint64_t i = 0; i < count; i++)
      found.indices.push_back({read<char*>(arrays + 8 * i), read<int64_t>(arrays + size + 8 * i),
                               read<int64_t>(arrays + 2 * size + 8 * i)});
    return found;
  }

  // Where the indices point to, in bytes.
  int64_t offset(int64_t index_offset) const {
    int64_t found = 0;
    for (const Index& one : indices) {
      auto index = read<int64_t>(one.at + index_offset);
      found += (index < 0 ? index + one.size : index) * one.stride;
    }
    return found;
  }
};

Work by_index(const Launch& launch) {
  bool puts = launch.name.find("index_put_kernel_impl<") != std::string::npos;
  if (!puts && launch.name.find("index_kernel_impl<") == std::string::npos) return {};
  std::vector<std::string> opaque = arguments_of("OpaqueType", launch.name);
  auto all = Indexed::of(static_cast<const char*>(launch.arguments[1]));
  if (opaque.empty() || !all) return {};
  size_t width = strtoul(opaque[0].c_str(), nullptr, 10);
  int64_t count = launch.argument<int64_t>(0);
  return [=, all = *all](Writes& writes) {
    for (int64_t i = 0; i < count; i++) {
      int64_t at[Offsets::most];
      all.offsets.at(i, at);
      int64_t offset = all.offset(at[2]);
      writes.put(all.to + at[0] + (puts ? offset : 0), all.from + at[1] + (puts ? 0 : offset), width);
    }
  };
}

// torch.nonzero takes three steps of CUB's: it counts, puts the places of what is not zero into a line, and makes
// indices by dimension of them. In the first two the argument of what is looked at begins with its address.
std::optional<Type> looked_at(const Launch& launch) {
  std::vector<std::string> given = arguments_of("NonZeroOp", launch.name);
  return given.empty() ? std::nullopt : type_named(given[0]);
}

Work count_nonzero(const Launch& launch) {
  auto type = looked_at(launch);
  if (!type || launch.parts.arguments[2] != "int*") return {};
  char *from = launch.address(0), *to = launch.address(1);
  int64_t count = launch.argument<int64_t>(2);
  return [=](Writes& writes) {
    int found = 0;
    for (int64_t i = 0; i < count; i++) found += load(*type, from + i * static_cast<int64_t>(width_of(*type))) != 0;
    writes.put(to, Type::int32, found);
  };
}

Work select_nonzero(const Launch& launch) {
  auto type = looked_at(launch);
  if (!type || launch.grid.x != 1) return {};
  auto first = launch.argument<int64_t>(0);
  char *flags = launch.address(1), *to = launch.address(2);
  int count = launch.argument<int>(7);
  return [=](Writes& writes) {
    char* next = to;
    for (int i = 0; i < count; i++) {
      if (load(*type, flags + i * static_cast<int64_t>(width_of(*type))) == 0) continue;
      writes.put(next, Type::int64, static_cast<double>(first + i));
      next += 8;
    }
  };
}

// The places, the sizes of dimensions, how many of these, and how many places.
Work indices_of_places(const Launch& launch) {
  bool wide = launch.parts.arguments[0] == "long";
  char* places = launch.address(0);
  int dimensions = launch.argument<int>(2);
  int64_t count = wide ? launch.argument<int64_t>(3) : launch.argument<int>(3);
  std::vector<int64_t> sizes;
  auto* given = static_cast<const char*>(launch.arguments[1]);
  for (int i = 0; i < dimensions; i++) sizes.push_back(wide ? read<int64_t>(given + 8 * i) : read<int>(given + 4 * i));
  return [=](Writes& writes) {
    for (int64_t i = 0; i < count; i++) {
      auto place = read<int64_t>(places + 8 * i);
      for (int dimension = dimensions - 1; dimension >= 0; dimension--) {
        writes.put(places + 8 * (i + dimension * count), Type::int64, static_cast<double>(place % sizes[dimension]));
        place /= sizes[dimension];
      }
    }
  };
}

}  // namespace

Work indexing(const Launch& launch) {
  if (launch.parts.base == "index_elementwise_kernel") return by_index(launch);
  if (launch.parts.base == "DeviceReduceSingleTileKernel") return count_nonzero(launch);
  if (launch.parts.base == "DeviceCompactInitKernel") return [](Writes&) {};  // counters of the next
  if (launch.parts.base == "DeviceSelectSweepKernel") return select_nonzero(launch);
  if (launch.parts.base == "write_indices") return indices_of_places(launch);
  return {};
}

}  // namespace compute
