// Philox-4x32-10 (Salmon et al. 2011) with the numbering of megadiff/ops/philox.py, the same on every device.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define MEGADIFF_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define MEGADIFF_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace megadiff {

// What the words of one sample have in common.
struct PhiloxStream {
  uint32_t key[2];      // the seed's low and high word
  uint32_t counter[3];  // id low word, step, purpose << 24 | id bits 32-55
};

MEGADIFF_HOST_DEVICE PhiloxStream philox_stream(uint64_t seed, uint32_t step, uint32_t purpose, int64_t sample_id) {
  const uint64_t id = uint64_t(sample_id);
  return {{uint32_t(seed), uint32_t(seed >> 32)},
          {uint32_t(id), step, (purpose << 24) | (uint32_t(id >> 32) & 0xffffffu)}};
}

// Words 4 block ... 4 block + 3 of a stream. A Wide is a 64-bit integer, or a vector of them, whose lower half is the
// word; the upper half may hold anything, before and after. multiply(wide, factor) is the product of the lower half.
template <class Wide, class Multiply>
MEGADIFF_HOST_DEVICE void philox_words(const PhiloxStream& stream, Wide block, Multiply multiply, Wide (&words)[4]) {
  const Wide zero = block ^ block;
  Wide c0 = block, c1 = zero + stream.counter[0], c2 = zero + stream.counter[1], c3 = zero + stream.counter[2];
  uint32_t k0 = stream.key[0], k1 = stream.key[1];
  for (int round = 0; round < 10; ++round) {
    const Wide p0 = multiply(c0, 0xd2511f53u), p1 = multiply(c2, 0xcd9e8d57u);
    c0 = (p1 >> 32) ^ c1 ^ k0;
    c1 = p1;
    c2 = (p0 >> 32) ^ c3 ^ k1;
    c3 = p0;
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  words[0] = c0;
  words[1] = c1;
  words[2] = c2;
  words[3] = c3;
}

}  // namespace megadiff
