// NCCL's types, declared by hand: its header comes in a package of 206 MB.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace nccl {

enum Result : int {
  success = 0,
  unhandled_cuda_error = 1,
  system_error = 2,
  invalid_argument = 4,
  invalid_usage = 5,
  remote_error = 6
};

enum class Type : int {
  int8,
  uint8,
  int32,
  uint32,
  int64,
  uint64,
  float16,
  float32,
  float64,
  bfloat16,
  float8e4m3,
  float8e5m2
};

// Numbers from `first_custom` on are operations that multiply by a number first, and then add.
enum Reduction : int { sum, prod, max, min, avg, first_custom };

struct UniqueId {
  char bytes[128];
};

constexpr int version = 22907;
constexpr int no_color = -1;  // of a rank that takes no part in a split

inline size_t width_of(Type type) {
  switch (type) {
    case Type::int8:
    case Type::uint8:
    case Type::float8e4m3:
    case Type::float8e5m2: return 1;
    case Type::float16:
    case Type::bfloat16: return 2;
    case Type::int64:
    case Type::uint64:
    case Type::float64: return 8;
    default: return 4;
  }
}

inline std::string name_of(Type type) {
  static const char* const names[] = {"i8",  "u8",  "i32", "u32",  "i64",    "u64",
                                      "f16", "f32", "f64", "bf16", "f8e4m3", "f8e5m2"};
  return names[static_cast<int>(type)];
}

}  // namespace nccl
