// Noise, noisy sample and target on CUDA: a thread makes the four elements of one Philox block.
#include "common/diffuse.h"

#include "common/philox.h"
#include "cuda/element_types.h"

namespace megadiff::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPerThread = 4;

// Box-Muller with the float32 steps of megadiff/ops/philox.py.
__device__ __forceinline__ void normal_pair(uint32_t first, uint32_t second, float* even, float* odd) {
  const float uniform = (float(first) + 0.5f) * 0x1p-32f;
  const float radius = sqrtf(-2.0f * logf(uniform));
  const float angle = float(second) * (6.28318530717958647692f * 0x1p-32f);
  *even = radius * cosf(angle);
  *odd = radius * sinf(angle);
}

template <class T>
__global__ void __launch_bounds__(kThreads) diffuse_kernel(Diffuse args, int64_t blocks_per_sample) {
  const int64_t index = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= args.batch * blocks_per_sample) return;
  const int64_t sample = index / blocks_per_sample, block = index % blocks_per_sample;
  const int64_t base = sample * args.numel;
  const float* c = args.coefficients + 4 * sample;
  float noise[kPerThread] = {};
  if (args.noise == nullptr) {
    const PhiloxStream stream = philox_stream(args.seed, args.step, args.purpose, args.sample_ids[sample]);
    const PhiloxWords words = philox_words(stream, uint32_t(block));
    normal_pair(words.at[0], words.at[1], &noise[0], &noise[1]);
    normal_pair(words.at[2], words.at[3], &noise[2], &noise[3]);
  }
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int64_t element = block * kPerThread + i;
    if (element < args.numel) {
      const int64_t at = base + element;
      const float x0 = load(static_cast<const T*>(args.x0)[at]);
      const float n = args.noise ? load(static_cast<const T*>(args.noise)[at]) : noise[i];
      store(static_cast<T*>(args.x_t) + at, c[0] * x0 + c[1] * n);
      store(static_cast<T*>(args.target) + at, c[2] * n + c[3] * x0);
    }
  }
}

__global__ void __launch_bounds__(kThreads) philox_bits_kernel(PhiloxBits args) {
  const int64_t at = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= args.batch * args.numel) return;
  const int64_t sample = at / args.numel, element = at % args.numel;
  const PhiloxStream stream = philox_stream(args.seed, args.step, args.purpose, args.sample_ids[sample]);
  args.words[at] = philox_words(stream, uint32_t(element / 4)).at[element % 4];
}

}  // namespace

void diffuse(const Diffuse& args, Stream stream) {
  const int64_t blocks_per_sample = ceil_divide(args.numel, kPerThread);
  with_type(args.dtype, [&](auto type) {
    MD_LAUNCH(diffuse_kernel<typename decltype(type)::type>, unsigned(ceil_divide(args.batch * blocks_per_sample, kThreads)),
              kThreads, 0, stream, args, blocks_per_sample);
  });
}

void philox_bits(const PhiloxBits& args, Stream stream) {
  MD_LAUNCH(philox_bits_kernel, unsigned(ceil_divide(args.batch * args.numel, kThreads)), kThreads, 0, stream, args);
}

}  // namespace megadiff::cuda
