// Element types, and a register full of floats as the compiler's own vector type: the same source becomes AVX-512, AVX2
// or whatever the machine has. Every file in this folder is compiled once for each instruction set; all its names live
// in the namespace of that set.
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

// ---- one element

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

// An element of a small tensor whose dtype is known at run time only, or `absent` where there is no tensor.
MEGADIFF_INLINE float load_at(const void* from, Dtype dtype, int64_t index, float absent) {
  if (!from) return absent;
  switch (dtype) {
    case Dtype::kBFloat16: return load(static_cast<const BFloat16*>(from)[index]);
    case Dtype::kFloat16: return load(static_cast<const Float16*>(from)[index]);
    default: return static_cast<const float*>(from)[index];
  }
}

// ---- a vector of elements

#if defined(__AVX512F__)
constexpr int64_t kLanes = 16;
#elif defined(__AVX2__)
constexpr int64_t kLanes = 8;
#else
constexpr int64_t kLanes = 4;
#endif
typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef uint32_t VecBits __attribute__((vector_size(4 * kLanes)));
typedef uint16_t VecHalves __attribute__((vector_size(2 * kLanes)));

MEGADIFF_INLINE Vec splat(float value) { return value - Vec{}; }

MEGADIFF_INLINE Vec load_vec(const float* from) {
  Vec values;
  std::memcpy(&values, from, sizeof values);
  return values;
}

MEGADIFF_INLINE Vec load_vec(const BFloat16* from) {
  VecHalves halves;
  std::memcpy(&halves, from, sizeof halves);
  return Vec(__builtin_convertvector(halves, VecBits) << 16);
}

MEGADIFF_INLINE Vec load_vec(const Float16* from) {
  Vec values;
  for (int64_t i = 0; i < kLanes; ++i) values[i] = load(from[i]);
  return values;
}

MEGADIFF_INLINE void store_vec(float* to, Vec values) { std::memcpy(to, &values, sizeof values); }

MEGADIFF_INLINE void store_vec(BFloat16* to, Vec values) {
  const VecBits bits = VecBits(values);
  const VecBits rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const VecBits kept = VecBits(values != values) ? (VecBits{} + 0x7fc0u) : rounded;
  const VecHalves halves = __builtin_convertvector(kept, VecHalves);
  std::memcpy(to, &halves, sizeof halves);
}

MEGADIFF_INLINE void store_vec(Float16* to, Vec values) {
  for (int64_t i = 0; i < kLanes; ++i) store(to + i, values[i]);
}

// The first `count` < kLanes elements; the others read as zero and are not written.
template <class T>
MEGADIFF_INLINE Vec load_part(const T* from, int64_t count) {
  T whole[kLanes];
  std::memset(whole, 0, sizeof whole);
  std::memcpy(whole, from, size_t(count) * sizeof(T));
  return load_vec(whole);
}

template <class T>
MEGADIFF_INLINE void store_part(T* to, Vec values, int64_t count) {
  T whole[kLanes];
  store_vec(whole, values);
  std::memcpy(to, whole, size_t(count) * sizeof(T));
}

MEGADIFF_INLINE float sum_of(Vec values) {
  float sum = 0.0f;
  for (int64_t i = 0; i < kLanes; ++i) sum += values[i];
  return sum;
}

// The lanes below `count`, zero elsewhere.
MEGADIFF_INLINE Vec keep_first(Vec values, int64_t count) {
  for (int64_t i = count; i < kLanes; ++i) values[i] = 0.0f;
  return values;
}

// e^x within about 1 ulp on [-87.3, 88.3] and clamped to its value there outside, a NaN for NaN: Cody-Waite reduction to
// [-ln2/2, ln2/2] and a polynomial of degree 7.
MEGADIFF_INLINE Vec exp_(Vec x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23 = 0x4b400000: adding it leaves the nearest integer in the low bits
  x = x > 88.3f ? splat(88.3f) : x;
  x = x < -87.3f ? splat(-87.3f) : x;
  const Vec shifted = x * 1.44269504f + kRound;
  const Vec n = shifted - kRound;
  const Vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + (r + 1.0f);
  return p * Vec((VecBits(shifted) - 0x4b400000u + 127u) << 23);
}

MEGADIFF_INLINE Vec sigmoid(Vec x) { return 1.0f / (1.0f + exp_(-x)); }

}  // namespace megadiff::cpu::MEGADIFF_ISA
