// Floats of 16 bits, as the host has none.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace simulation {

struct BFloat16 {
  uint16_t bits;
  static float widen(BFloat16 narrow) {
    uint32_t wide = static_cast<uint32_t>(narrow.bits) << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
  }
  // Rounds to even.
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

}  // namespace simulation
