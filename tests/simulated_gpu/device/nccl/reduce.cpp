#include "reduce.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace nccl {
namespace {

// Numbers of 16 bits are reduced as floats, and rounded to even at the end.
struct BFloat16 {
  uint16_t bits;
  static float widen(BFloat16 narrow) {
    uint32_t wide = static_cast<uint32_t>(narrow.bits) << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
  }
  static BFloat16 narrow(float value) {
    if (std::isnan(value)) return {0x7fc0};
    uint32_t wide;
    memcpy(&wide, &value, sizeof wide);
    wide += 0x7fff + ((wide >> 16) & 1);
    return {static_cast<uint16_t>(wide >> 16)};
  }
};

struct Half {
  uint16_t bits;
  static float widen(Half narrow) {
    int exponent = (narrow.bits >> 10) & 31, mantissa = narrow.bits & 1023;
    float size = exponent == 0    ? std::ldexp(static_cast<float>(mantissa), -24)
                 : exponent == 31 ? (mantissa ? NAN : INFINITY)
                                  : std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25);
    return narrow.bits & 0x8000 ? -size : size;
  }
  static Half narrow(float value) {
    uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    float size = std::fabs(value);
    if (std::isnan(value)) return {static_cast<uint16_t>(sign | 0x7e00)};
    if (size >= 65520) return {static_cast<uint16_t>(sign | 0x7c00)};
    if (size == 0) return {sign};
    int exponent = std::max(-14, std::ilogb(size));
    // nearbyint rounds to even. A mantissa that it rounds up to 2048 carries into the exponent, as it should.
    auto mantissa = static_cast<uint16_t>(std::nearbyint(std::ldexp(size, 10 - exponent)));
    uint16_t biased = mantissa < 1024 ? 0 : static_cast<uint16_t>((exponent + 14) << 10);
    return {static_cast<uint16_t>(sign | (biased + mantissa))};
  }
};

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
