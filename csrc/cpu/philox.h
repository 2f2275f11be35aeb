// Philox for kLanes blocks at a time.
#pragma once

#include "common/philox.h"
#include "cpu/vector.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace megadiff::cpu::MEGADIFF_ISA {

typedef uint64_t VecWide __attribute__((vector_size(4 * kLanes)));

// The compiler does not see by itself that one instruction multiplies the lower halves.
struct MultiplyLowerHalves {
  MEGADIFF_INLINE_MEMBER VecWide operator()(VecWide words, uint32_t factor) const {
    const VecWide factors = VecWide{} + factor;
#if defined(__AVX512F__)
    return VecWide(_mm512_maskz_mul_epu32(0xff, __m512i(words), __m512i(factors)));
#elif defined(__AVX2__)
    return VecWide(_mm256_mul_epu32(__m256i(words), __m256i(factors)));
#elif defined(__SSE2__)
    return VecWide(_mm_mul_epu32(__m128i(words), __m128i(factors)));
#else
    return (words & 0xffffffffu) * factors;
#endif
  }
};

struct WordVectors {
  VecBits at[4];
};

// Lane i holds the words of block first + i.
MEGADIFF_INLINE WordVectors words_from(const PhiloxStream& stream, uint32_t first) {
  VecWide block;
  for (int64_t i = 0; i < kLanes / 2; ++i) block[i] = uint64_t(2 * i);
  block += first;
  VecWide even[4], odd[4];
  philox_words(stream, block, MultiplyLowerHalves{}, even);
  philox_words(stream, block + 1u, MultiplyLowerHalves{}, odd);
  WordVectors words;
  for (int k = 0; k < 4; ++k) words.at[k] = VecBits((even[k] & 0xffffffffu) | (odd[k] << 32));
  return words;
}

}  // namespace megadiff::cpu::MEGADIFF_ISA
