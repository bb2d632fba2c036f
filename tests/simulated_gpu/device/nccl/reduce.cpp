#include "reduce.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "../core/numbers.h"

namespace nccl {
namespace {

// Numbers of 16 bits are reduced as floats, and rounded to even at the end.
using simulation::BFloat16;
using simulation::Half;

template <class Number>
Number combine(Number a, Number b, int operation) {
  switch (operation) {
    case prod: return static_cast<Number>(a * b);
    case max: return std::max(a, b);
    case min: return std::min(a, b);
    default: return static_cast<Number>(a + b);
  }
}

// Reads each number as Wide by `widen` and gives back the result by `narrow`.
template <class Stored, class Wide, class Widen, class Narrow>
void reduce_as(void* to, const std::vector<const char*>& sources, size_t count, int operation, double scale,
               Widen widen, Narrow narrow) {
  auto* result = static_cast<Stored*>(to);
  auto read = [&](size_t source, size_t i) {
    Wide value = widen(reinterpret_cast<const Stored*>(sources[source])[i]);
    return operation >= first_custom ? static_cast<Wide>(static_cast<double>(value) * scale) : value;
  };
  for (size_t i = 0; i < count; i++) {
    Wide value = read(0, i);
    for (size_t source = 1; source < sources.size(); source++) value = combine<Wide>(value, read(source, i), operation);
    if (operation == avg) value = static_cast<Wide>(static_cast<double>(value) / static_cast<double>(sources.size()));
    result[i] = narrow(value);
  }
}

// The case that matters for speed: gradients of two ranks.
bool add_two_floats(void* to, const std::vector<const char*>& sources, size_t count, Type type, int operation) {
  if (type != Type::float32 || (operation != sum && operation != avg) || sources.size() != 2) return false;
  auto* result = static_cast<float*>(to);
  auto* a = reinterpret_cast<const float*>(sources[0]);
  auto* b = reinterpret_cast<const float*>(sources[1]);
  float factor = operation == avg ? 0.5F : 1.0F;
  for (size_t i = 0; i < count; i++) result[i] = (a[i] + b[i]) * factor;
  return true;
}

}  // namespace

void reduce(void* to, const std::vector<const char*>& sources, size_t count, Type type, int operation, double scale) {
  if (add_two_floats(to, sources, count, type, operation)) return;
  auto plain = [&](auto example) {
    using Number = decltype(example);
    auto same = [](Number value) { return value; };
    reduce_as<Number, Number>(to, sources, count, operation, scale, same, same);
  };
  switch (type) {
    case Type::float32: return plain(float{});
    case Type::float64: return plain(double{});
    case Type::int8: return plain(int8_t{});
    case Type::uint8: return plain(uint8_t{});
    case Type::int32: return plain(int32_t{});
    case Type::uint32: return plain(uint32_t{});
    case Type::int64: return plain(int64_t{});
    case Type::uint64: return plain(uint64_t{});
    case Type::bfloat16:
      return reduce_as<BFloat16, float>(to, sources, count, operation, scale, BFloat16::widen, BFloat16::narrow);
    case Type::float16: return reduce_as<Half, float>(to, sources, count, operation, scale, Half::widen, Half::narrow);
    default: memcpy(to, sources[0], count * width_of(type));  // 8-bit floats are carried, not reduced
  }
}

double read_number(const void* address, Type type) {
  switch (type) {
    case Type::float32: return *static_cast<const float*>(address);
    case Type::float64: return *static_cast<const double*>(address);
    case Type::bfloat16: return BFloat16::widen(*static_cast<const BFloat16*>(address));
    case Type::float16: return Half::widen(*static_cast<const Half*>(address));
    default: return 1;
  }
}

}  // namespace nccl
