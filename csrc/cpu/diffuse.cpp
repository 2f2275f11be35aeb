// Noise, noisy sample and target on the CPU, four vectors at a time.
#include "common/diffuse.h"

#include "common/parallel.h"
#include "common/philox.h"
#include "cpu/element_types.h"
#include "cpu/normal.h"

namespace megadiff::cpu::MEGADIFF_ISA {
namespace {

constexpr int64_t kBlocks = kLanes, kElements = 4 * kBlocks;
// Elements of a sample that one thread takes at a time; a multiple of kElements.
constexpr int64_t kPart = 4096;

struct WordVectors {
  VecBits at[4];
};

// The words of blocks first, first + 1, ...: lane i holds those of block first + i.
MEGADIFF_INLINE WordVectors words_from(const PhiloxStream& stream, uint32_t first) {
  uint32_t words[4][kLanes];
  MEGADIFF_SIMD
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    const PhiloxWords block = philox_words(stream, first + uint32_t(lane));
    words[0][lane] = block.at[0];
    words[1][lane] = block.at[1];
    words[2][lane] = block.at[2];
    words[3][lane] = block.at[3];
  }
  WordVectors vectors;
  std::memcpy(&vectors, words, sizeof vectors);
  return vectors;
}

// Element 4 i + k of `to` from lane i of vector k.
MEGADIFF_INLINE void interleave(const Vec (&from)[4], float* to) {
  for (int64_t lane = 0; lane < kLanes; ++lane)
    for (int64_t k = 0; k < 4; ++k) to[4 * lane + k] = from[k][lane];
}

MEGADIFF_INLINE void normals_from(const PhiloxStream& stream, int64_t element, float* normals) {
  const WordVectors words = words_from(stream, uint32_t(element / 4));
  Vec pairs[4];
  box_muller(words.at[0], words.at[1], &pairs[0], &pairs[1]);
  box_muller(words.at[2], words.at[3], &pairs[2], &pairs[3]);
  interleave(pairs, normals);
}

struct Weights {
  float alpha, sigma, noise, clean;
};

// Elements [start, stop) of one sample.
template <class T>
void diffuse_part(const Diffuse& args, int64_t sample, int64_t start, int64_t stop) {
  const float* c = args.coefficients + 4 * sample;
  const Weights weights{c[0], c[1], c[2], c[3]};
  const T* x0 = static_cast<const T*>(args.x0) + sample * args.numel;
  const T* given = args.noise ? static_cast<const T*>(args.noise) + sample * args.numel : nullptr;
  T* x_t = static_cast<T*>(args.x_t) + sample * args.numel;
  T* target = static_cast<T*>(args.target) + sample * args.numel;
  PhiloxStream stream{};
  if (!given) stream = philox_stream(args.seed, args.step, args.purpose, args.sample_ids[sample]);
  float normals[kElements];
  for (int64_t at = start; at < stop; at += kElements) {
    if (!given) normals_from(stream, at, normals);
    const int64_t count = at + kElements < stop ? kElements : stop - at;
    for_vectors(count, [&](int64_t i, auto lanes) MEGADIFF_INLINE_LAMBDA {
      const Vec noise = given ? lanes.load(given + at + i) : load_vec(normals + i);
      const Vec clean = lanes.load(x0 + at + i);
      lanes.store(x_t + at + i, clean * weights.alpha + noise * weights.sigma);
      lanes.store(target + at + i, noise * weights.noise + clean * weights.clean);
    });
  }
}

}  // namespace

void diffuse(const Diffuse& args) {
  const int64_t parts = (args.numel + kPart - 1) / kPart;
  with_type(args.dtype, [&](auto type) {
    parallel_for(args.batch * parts, 1, [&](int64_t begin, int64_t end) {
      for (int64_t index = begin; index < end; ++index) {
        const int64_t start = index % parts * kPart;
        const int64_t stop = start + kPart < args.numel ? start + kPart : args.numel;
        diffuse_part<typename decltype(type)::type>(args, index / parts, start, stop);
      }
    });
  });
}

void philox_bits(const PhiloxBits& args) {
  for (int64_t sample = 0; sample < args.batch; ++sample) {
    const PhiloxStream stream = philox_stream(args.seed, args.step, args.purpose, args.sample_ids[sample]);
    for (int64_t start = 0; start < args.numel; start += kElements) {
      const WordVectors words = words_from(stream, uint32_t(start / 4));
      for (int64_t i = start; i < args.numel && i < start + kElements; ++i)
        args.words[sample * args.numel + i] = words.at[i % 4][(i - start) / 4];
    }
  }
}

}  // namespace megadiff::cpu::MEGADIFF_ISA
