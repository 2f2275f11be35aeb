// Philox-4x32-10 (Salmon et al. 2011) with the numbering of megadiff/ops/philox.py, the same on every device.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define MEGADIFF_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define MEGADIFF_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace megadiff {

struct PhiloxWords {
  uint32_t at[4];
};

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

// Words 4 block ... 4 block + 3 of a stream.
MEGADIFF_HOST_DEVICE PhiloxWords philox_words(const PhiloxStream& stream, uint32_t block) {
  uint32_t c0 = block, c1 = stream.counter[0], c2 = stream.counter[1], c3 = stream.counter[2];
  uint32_t k0 = stream.key[0], k1 = stream.key[1];
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t(0xd2511f53u) * c0, p1 = uint64_t(0xcd9e8d57u) * c2;
    c0 = uint32_t(p1 >> 32) ^ c1 ^ k0;
    c1 = uint32_t(p1);
    c2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
    c3 = uint32_t(p0);
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  return {{c0, c1, c2, c3}};
}

}  // namespace megadiff
