// Random numbers: by Philox from torch's seed and offset, the same in every run. They are not those of a real device,
// which deals them out to threads.
#include <cmath>

#include "compute.h"

namespace compute {
namespace {

class Philox {
 public:
  // torch's state of its generator: the seed, the offset, a further offset, and whether a graph is captured.
  explicit Philox(const void* state)
      : seed_(read<uint64_t>(state)),
        offset_(read<uint64_t>(static_cast<const char*>(state) + 8)),
        captured_(read<bool>(static_cast<const char*>(state) + 20)) {}
  bool is_known() const { return !captured_; }

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

 private:
  uint64_t seed_, offset_;
  bool captured_;
};

// Source, result, mask, how many, the share that is kept, the generator's state.
Work dropout(const Launch& launch) {
  auto type = type_named(launch.parts.arguments[0]), mask_type = type_named(launch.parts.arguments.back());
  Philox random(launch.arguments[5]);
  if (!type || !mask_type || launch.parts.arguments[1] != "float" || !random.is_known()) return {};
  // Contiguous: of each tensor's description only the address matters.
  char *from = launch.address(0), *to = launch.address(1), *mask = launch.address(2);
  int64_t count = launch.argument<uint32_t>(3);
  double kept = launch.argument<float>(4);
  return [=](Writes& writes) {
    auto width = static_cast<int64_t>(width_of(*type)), mask_width = static_cast<int64_t>(width_of(*mask_type));
    for (int64_t i = 0; i < count; i++) {
      bool keeps = Philox::unit(random.at(i).of[0]) < kept;
      writes.put(to + i * width, *type, keeps ? load(*type, from + i * width) / kept : 0);
    }
    for (int64_t i = 0; i < count; i++)
      writes.put(mask + i * mask_width, *mask_type, Philox::unit(random.at(i).of[0]) < kept);
  };
}

// How many, the generator's state, what draws, and what puts a number in place: an address, the distance of elements,
// and the members of what transforms it.
Work distribution(const Launch& launch) {
  Philox random(launch.arguments[1]);
  if (!random.is_known() || launch.name.find("{lambda(long, ") == std::string::npos) return {};
  int64_t count = launch.argument<int64_t>(0);
  auto* put = static_cast<const char*>(launch.arguments[3]);
  auto* to = read<char*>(put);
  int64_t stride = read<int>(put + 8);
  const char* members = put + 12;
  std::vector<std::string> normal = arguments_of("normal_and_transform", launch.name);
  std::vector<std::string> uniform = arguments_of("uniform_and_transform", launch.name);
  bool is_normal = !normal.empty();
  if (!is_normal && uniform.empty()) return {};
  auto type = type_named((is_normal ? normal : uniform)[0]);
  if (!type || *type == Type::float64) return {};
  double first = load(Type::float32, members), second = load(Type::float32, members + 4);
  return [=](Writes& writes) {
    for (int64_t i = 0; i < count; i++) {
      Philox::Four bits = random.at(i);
      double value;
      if (is_normal) {  // by Box and Muller
        value = std::sqrt(-2 * std::log(Philox::unit(bits.of[0]))) * std::cos(2 * M_PI * Philox::unit(bits.of[1]));
        value = first + second * value;
      } else {
        value = second + first * (1 - Philox::unit(bits.of[0]));  // the range, and where it begins
      }
      writes.put(to + i * stride, *type, value);
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
