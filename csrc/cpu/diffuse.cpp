// Noise, noisy sample and target on the CPU.
#include "common/diffuse.h"

#include "common/parallel.h"
#include "cpu/element_types.h"
#include "cpu/normal.h"
#include "cpu/philox.h"

namespace megadiff::cpu::MEGADIFF_ISA {
namespace {

constexpr int64_t kBlocks = kLanes, kElements = 4 * kBlocks;
// Elements of a sample that one thread takes at a time; a multiple of kChunk.
constexpr int64_t kPart = 4096;
// Elements whose words and normals wait in the L1 cache.
constexpr int64_t kChunk = 512;

// Element 4 i + k of `to` from lane i of vector k.
MEGADIFF_INLINE void interleave(const Vec (&from)[4], float* to) {
  for (int64_t lane = 0; lane < kLanes; ++lane)
    for (int64_t k = 0; k < 4; ++k) to[4 * lane + k] = from[k][lane];
}

// The normals of `count` elements from `start`, a multiple of 4; words first, so that both short loops pipeline well.
MEGADIFF_INLINE void fill_normals(const PhiloxStream& stream, int64_t start, int64_t count, float* normals) {
  WordVectors words[kChunk / kElements];
  const int64_t groups = (count + kElements - 1) / kElements;
  for (int64_t i = 0; i < groups; ++i) words[i] = words_from(stream, uint32_t(start / 4 + i * kBlocks));
  for (int64_t i = 0; i < groups; ++i) {
    Vec pairs[4];
    box_muller(words[i].at[0], words[i].at[1], &pairs[0], &pairs[1]);
    box_muller(words[i].at[2], words[i].at[3], &pairs[2], &pairs[3]);
    interleave(pairs, normals + i * kElements);
  }
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
  float normals[kChunk];
  for (int64_t at = start; at < stop; at += kChunk) {
    const int64_t count = at + kChunk < stop ? kChunk : stop - at;
    if (!given) fill_normals(stream, at, count, normals);
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
  const int64_t grain = 1 + kGrainElements / (args.numel < kPart ? args.numel : kPart);
  with_type(args.dtype, [&](auto type) {
    parallel_for(args.batch * parts, grain, [&](int64_t begin, int64_t end) {
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
