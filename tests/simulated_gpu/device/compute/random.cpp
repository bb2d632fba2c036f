// Random numbers: by Philox from torch's seed and offset, the same in every run. They are not those of a real device,
// which deals them out to threads.
#include <cmath>

#include "compute.h"
#include "offsets.h"

namespace compute {
namespace {

// torch's state of its generator. In a graph seed and offset are addresses: what lies there changes with each launch.
struct Generator {
  uint64_t seed, offset, offset_in_graph;
  bool captured;
};

class Philox {
 public:
  explicit Philox(const Generator& state) : seed_(state.seed), offset_(state.offset) {
    if (!state.captured) return;
    seed_ = read<uint64_t>(reinterpret_cast<const void*>(state.seed));
    offset_ = read<uint64_t>(reinterpret_cast<const void*>(state.offset)) + state.offset_in_graph;
  }

  struct Four {
    uint32_t of[4];
  };
  Four at(uint64_t index) const {
    uint32_t c[4] = {static_cast<uint32_t>(offset_), static_cast<uint32_t>(offset_ >> 32), static_cast<uint32_t>(index),
                     static_cast<uint32_t>(index >> 32)};
    auto key0 = static_cast<uint32_t>(seed_), key1 = static_cast<uint32_t>(seed_ >> 32);
    for (int round = 0; round < 10; round++) {
      uint64_t p0 = uint64_t{0xD2511F53} * c[0], p1 = uint64_t{0xCD9E8D57} * c[2];
      uint32_t next[4] = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ key0, static_cast<uint32_t>(p1),
                          static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ key1, static_cast<uint32_t>(p0)};
      memcpy(c, next, sizeof c);
      key0 += 0x9E3779B9;
      key1 += 0xBB67AE85;
    }
    return {{c[0], c[1], c[2], c[3]}};
  }
  // In (0, 1].
  static double unit(uint32_t bits) { return (static_cast<double>(bits) + 1) / 4294967296.0; }
  static double fine_unit(const Four& bits) {
    uint64_t both = uint64_t{bits.of[0]} << 21 ^ bits.of[1] >> 11;
    return (static_cast<double>(both) + 1) / 9007199254740992.0;
  }

 private:
  uint64_t seed_, offset_;
};

// Source, result, mask, how many, the share that is kept, the generator's state.
Work dropout(const Launch& launch) {
  auto type = type_named(launch.parts.arguments[0]), mask_type = type_named(launch.parts.arguments.back());
  auto state = launch.argument<Generator>(5);
  if (!type || !mask_type || launch.parts.arguments[1] != "float") return {};
  // Contiguous: of each tensor's description only the address matters.
  char *from = launch.address(0), *to = launch.address(1), *mask = launch.address(2);
  int64_t count = launch.argument<uint32_t>(3);
  double kept = launch.argument<float>(4);
  return [=](Writes& writes) {
    Philox random(state);
    auto width = static_cast<int64_t>(width_of(*type)), mask_width = static_cast<int64_t>(width_of(*mask_type));
    for (int64_t i = 0; i < count; i++) {
      bool keeps = Philox::unit(random.at(i).of[0]) < kept;
      writes.put(to + i * width, *type, keeps ? load(*type, from + i * width) / kept : 0);
    }
    for (int64_t i = 0; i < count; i++)
      writes.put(mask + i * mask_width, *mask_type, Philox::unit(random.at(i).of[0]) < kept);
  };
}

// A number of each kind of distribution, from random bits; the members of what torch transforms them with lie at `at`.
// Empty: not known.
std::function<double(const Philox::Four&)> number_of(const std::string& name, Type type, const char* at) {
  auto is = [&](const char* kernel) { return name.find(std::string("::") + kernel + "<") != std::string::npos; };
  bool fine = type == Type::float64;
  auto width = static_cast<int>(width_of(wide(type)));
  if (is("uniform_kernel")) {  // the range, where it begins, and where it ends, which is no part of it
    double range = load(wide(type), at), from = load(type, at + width);
    double to = load(type, at + width + static_cast<int>(width_of(type)));
    return [=](const Philox::Four& bits) {
      char stored[8];
      store(type, stored, from + range * (fine ? Philox::fine_unit(bits) : Philox::unit(bits.of[0])));
      double value = load(type, stored);
      return value == to ? from : value;
    };
  }
  if (is("normal_kernel")) {  // the mean and the deviation; by Box and Muller
    double mean = load(wide(type), at), deviation = load(wide(type), at + width);
    return [=](const Philox::Four& bits) {
      double radius = std::sqrt(-2 * std::log(Philox::unit(bits.of[0])));
      return mean + deviation * radius * std::cos(2 * M_PI * Philox::unit(bits.of[1]));
    };
  }
  if (is("bernoulli_kernel")) {
    auto share = read<double>(at);
    return [=](const Philox::Four& bits) { return static_cast<double>(Philox::unit(bits.of[0]) <= share); };
  }
  if (is("random_from_to_kernel")) {  // how many integers, and the first
    auto range = read<uint64_t>(at);
    auto first = read<int64_t>(at + 8);
    return [=](const Philox::Four& bits) {
      uint64_t drawn = uint64_t{bits.of[0]} << 32 | bits.of[1];
      return static_cast<double>(first + static_cast<int64_t>(drawn % range));
    };
  }
  return {};
}

// How many, the generator's state, what draws, and what puts a number in place: an address and the distance of
// elements, or offsets and an address; then what transforms it.
Work distribution(const Launch& launch) {
  auto state = launch.argument<Generator>(1);
  std::vector<std::string> given = arguments_of("distribution_nullary_kernel", launch.name);
  auto type = given.empty() ? std::nullopt : type_named(given[0]);
  if (!type) return {};
  int64_t count = launch.argument<int64_t>(0);
  auto* put = static_cast<const char*>(launch.arguments[3]);
  bool strided = lambda(launch.parts.arguments.back()).number == 2;
  size_t at = strided ? (Offsets::size_of(1) + 7) / 8 * 8 : 0;
  auto* to = read<char*>(put + at);
  Offsets offsets = strided ? Offsets::of(put, 1) : Offsets();
  int64_t stride = strided ? 0 : read<int>(put + 8);
  size_t alignment = launch.name.find("::normal_kernel<") != std::string::npos ||
                             launch.name.find("::uniform_kernel<") != std::string::npos
                         ? width_of(wide(*type))
                         : 8;
  at += strided ? 8 : 12;
  auto number = number_of(launch.name, *type, put + (at + alignment - 1) / alignment * alignment);
  if (!number) return {};
  return [=](Writes& writes) {
    Philox random(state);
    for (int64_t i = 0; i < count; i++) {
      int64_t offset = i * stride;
      if (strided) offsets.at(i, &offset);
      writes.put(to + offset, *type, number(random.at(i)));
    }
  };
}

}  // namespace

Work random_numbers(const Launch& launch) {
  if (launch.parts.base == "fused_dropout_kernel_vec") return dropout(launch);
  if (launch.parts.base == "distribution_elementwise_grid_stride_kernel") return distribution(launch);
  return {};
}

}  // namespace compute
