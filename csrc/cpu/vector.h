// Element types and elementary functions as plain inline code that the compiler turns into vector instructions.
// Every file in this folder is compiled once for each instruction set; all its names live in the namespace of that set.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/types.h"

#define MEGADIFF_INLINE static inline __attribute__((always_inline))
#define MEGADIFF_SIMD _Pragma("omp simd")

namespace megadiff::cpu::MEGADIFF_ISA {

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  _Float16 value;
};

MEGADIFF_INLINE float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

MEGADIFF_INLINE uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

MEGADIFF_INLINE float load(float value) { return value; }
MEGADIFF_INLINE float load(BFloat16 value) { return bits_to_float(uint32_t(value.bits) << 16); }
MEGADIFF_INLINE float load(Float16 value) { return float(value.value); }

// Round to nearest even; a NaN stays a NaN.
MEGADIFF_INLINE void store(float* to, float value) { *to = value; }
MEGADIFF_INLINE void store(BFloat16* to, float value) {
  const uint32_t bits = float_to_bits(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  to->bits = uint16_t(value != value ? 0x7fc0u : rounded);
}
MEGADIFF_INLINE void store(Float16* to, float value) { to->value = _Float16(value); }

// e^x within about 1 ulp for every x: Cody-Waite reduction and a degree-5 polynomial on [-ln2/2, ln2/2].
MEGADIFF_INLINE float exp_(float x) {
  x = x > 88.72283f ? 88.72283f : x;
  x = x < -87.33654f ? -87.33654f : x;
  const float n = std::nearbyintf(x * 1.44269504f);
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return p * bits_to_float(uint32_t(int32_t(n) + 127) << 23);
}

}  // namespace megadiff::cpu::MEGADIFF_ISA
