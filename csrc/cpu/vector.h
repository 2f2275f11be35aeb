// Element types, and a register full of floats as the compiler's own vector type: the same source becomes AVX-512, AVX2
// or whatever the machine has. Every file in this folder is compiled once for each instruction set; all its names live
// in the namespace of that set.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "common/types.h"

#define MEGADIFF_INLINE static inline __attribute__((always_inline))
#define MEGADIFF_INLINE_MEMBER inline __attribute__((always_inline))
#define MEGADIFF_INLINE_LAMBDA __attribute__((always_inline))
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
constexpr __mmask16 kAllLanes = 0xffff;
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
#if defined(__AVX512F__)
  return _mm512_maskz_cvtph_ps(kAllLanes, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__AVX2__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  Vec values;
  for (int64_t i = 0; i < kLanes; ++i) values[i] = load(from[i]);
  return values;
#endif
}

MEGADIFF_INLINE void store_vec(float* to, Vec values) { std::memcpy(to, &values, sizeof values); }

MEGADIFF_INLINE void store_vec(BFloat16* to, Vec values) {
  const VecBits bits = VecBits(values);
  const VecBits rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const VecBits nan = VecBits{} + 0x7fc0u;
  const VecBits kept = values == values ? rounded : nan;
  const VecHalves halves = __builtin_convertvector(kept, VecHalves);
  std::memcpy(to, &halves, sizeof halves);
}

MEGADIFF_INLINE void store_vec(Float16* to, Vec values) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(
      reinterpret_cast<__m256i*>(to), _mm512_maskz_cvtps_ph(kAllLanes, values, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int64_t i = 0; i < kLanes; ++i) store(to + i, values[i]);
#endif
}

// The lower and upper halves of a vector, added.
template <class Narrow, class Wide>
MEGADIFF_INLINE Narrow fold(Wide values) {
  Narrow halves[2];
  std::memcpy(halves, &values, sizeof values);
  return halves[0] + halves[1];
}

MEGADIFF_INLINE float sum_of(Vec values) {
  typedef float Two __attribute__((vector_size(8)));
#if defined(__AVX512F__)
  const Two last = fold<Two>(fold<__m128>(fold<__m256>(values)));
#elif defined(__AVX2__)
  const Two last = fold<Two>(fold<__m128>(values));
#else
  const Two last = fold<Two>(values);
#endif
  return last[0] + last[1];
}

template <size_t kBytes>
MEGADIFF_INLINE void stream_bytes(void* to, const void* from) {
#if defined(__AVX512F__)
  if constexpr (kBytes == 64) return _mm512_stream_si512(static_cast<__m512i*>(to), _mm512_loadu_si512(from));
#endif
#if defined(__AVX2__)
  if constexpr (kBytes == 32) {
    _mm256_stream_si256(static_cast<__m256i*>(to), _mm256_loadu_si256(static_cast<const __m256i*>(from)));
  } else {
    _mm_stream_si128(static_cast<__m128i*>(to), _mm_loadu_si128(static_cast<const __m128i*>(from)));
  }
#else
  std::memcpy(to, from, kBytes);
#endif
}

MEGADIFF_INLINE void stream_fence() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

// How a loop over any number of elements reads and writes a vector of them: all lanes, or the `count` that are left. The
// lanes beyond read as zero and are not written.
struct Whole {
  template <class T>
  MEGADIFF_INLINE_MEMBER Vec load(const T* from) const { return load_vec(from); }
  template <class T>
  MEGADIFF_INLINE_MEMBER void store(T* to, Vec values) const { store_vec(to, values); }
  MEGADIFF_INLINE_MEMBER Vec keep(Vec values) const { return values; }
};

// As Whole, but what is written goes to memory past the caches: nothing is read for it, and nothing else is driven out.
// Addresses must be multiples of a vector's size, and stream_fence() must follow before other threads read.
struct Streamed : Whole {
  template <class T>
  MEGADIFF_INLINE_MEMBER void store(T* to, Vec values) const {
    T lanes[kLanes];
    store_vec(lanes, values);
    stream_bytes<sizeof lanes>(to, lanes);
  }
};

struct Part {
  int64_t count;

  template <class T>
  MEGADIFF_INLINE_MEMBER Vec load(const T* from) const {
    T lanes[kLanes] = {};
    std::memcpy(lanes, from, size_t(count) * sizeof(T));
    return load_vec(lanes);
  }
  template <class T>
  MEGADIFF_INLINE_MEMBER void store(T* to, Vec values) const {
    T lanes[kLanes];
    store_vec(lanes, values);
    std::memcpy(to, lanes, size_t(count) * sizeof(T));
  }
  // The lanes that are there, zero elsewhere.
  MEGADIFF_INLINE_MEMBER Vec keep(Vec values) const {
    for (int64_t i = count; i < kLanes; ++i) values[i] = 0.0f;
    return values;
  }
};

// Calls f(i, Lanes{} or Part) for every kLanes of [0, count).
template <class Lanes = Whole, class F>
MEGADIFF_INLINE void for_vectors(int64_t count, const F& f) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) f(i, Lanes{});
  if (i < count) f(i, Part{count - i});
}

// ---- elementary functions

// 2^t and from it e^x, with an error of about 1 ulp + |x| 2^-24; a NaN for a NaN. On AVX-512 they reach infinity and
// zero; elsewhere they stay at about 2^127 and 2^-126. The polynomial is the best of degree 5 for 2^r in relative error.
MEGADIFF_INLINE Vec exp2_(Vec t) {
#if defined(__AVX512F__)
  // _mm512_scalef_ps(p, t) is p 2^floor(t), and the remainder of an infinity is 0. The forms with a mask (of all lanes)
  // are there because GCC warns of the others.
  const Vec r = _mm512_maskz_reduce_ps(kAllLanes, t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  Vec p = r * 1.87757667e-3f + 8.98934009e-3f;
  p = p * r + 5.58263180e-2f;
  p = p * r + 2.40153617e-1f;
  p = p * r + 6.93153073e-1f;
  p = p * r + 9.99999994e-1f;
  return _mm512_maskz_scalef_ps(kAllLanes, p, t);
#else
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23 = 0x4b400000: adding it leaves the nearest integer in the low bits
#if defined(__AVX2__)  // of ?: the compiler makes two instructions each; a NaN as the second operand stays
  t = _mm256_max_ps(splat(-126.0f), _mm256_min_ps(splat(127.0f), t));
#else
  t = splat(127.0f) < t ? splat(127.0f) : t;
  t = splat(-126.0f) > t ? splat(-126.0f) : t;
#endif
  const Vec shifted = t + kRound;
  const Vec r = t - (shifted - kRound);
  Vec p = r * 1.32764720e-3f + 9.67554150e-3f;
  p = p * r + 5.55071328e-2f;
  p = p * r + 2.40221197e-1f;
  p = p * r + 6.93146967e-1f;
  p = p * r + 1.0f;
  return p * Vec((VecBits(shifted) << 23) + 0x3f800000u);
#endif
}

MEGADIFF_INLINE Vec exp_(Vec x) { return exp2_(x * 1.44269504f); }

MEGADIFF_INLINE Vec sigmoid(Vec x) { return 1.0f / (1.0f + exp_(-x)); }
MEGADIFF_INLINE Vec silu(Vec x) { return x / (1.0f + exp_(-x)); }

}  // namespace megadiff::cpu::MEGADIFF_ISA
