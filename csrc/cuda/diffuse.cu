// Noise, noisy sample and target on CUDA: a thread makes the four elements of one Philox block.
#include "common/diffuse.h"

#include "common/philox.h"
#include "cuda/rows.h"

namespace megadiff::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPerThread = 4;

template <class T>
using Four = Pack<T, kPerThread>;

struct Multiply {
  __device__ __forceinline__ uint64_t operator()(uint64_t word, uint32_t factor) const {
    return uint64_t(uint32_t(word)) * factor;
  }
};

// Box-Muller with the float32 steps of megadiff/ops/philox.py.
__device__ __forceinline__ void normal_pair(uint32_t first, uint32_t second, float* even, float* odd) {
  const float uniform = (float(first) + 0.5f) * 0x1p-32f;
  const float radius = sqrtf(-2.0f * logf(uniform));
  sincosf(float(second) * (6.28318530717958647692f * 0x1p-32f), odd, even);
  *even *= radius;
  *odd *= radius;
}

__device__ __forceinline__ Four<float> normals_of(const Diffuse& args, int64_t sample, int64_t block) {
  uint64_t words[kPerThread];
  const PhiloxStream stream = philox_stream(args.seed, args.step, args.purpose, args.sample_ids[sample]);
  philox_words(stream, uint64_t(block), Multiply{}, words);
  Four<float> normals;
  normal_pair(uint32_t(words[0]), uint32_t(words[1]), &normals.at[0], &normals.at[1]);
  normal_pair(uint32_t(words[2]), uint32_t(words[3]), &normals.at[2], &normals.at[3]);
  return normals;
}

// The first `count` of four elements; kWhole promises that there are four, and aligned.
template <bool kWhole, class T>
__device__ __forceinline__ Four<float> read_four(const void* from, int64_t at, int64_t count) {
  const T* first = static_cast<const T*>(from) + at;
  Four<T> read = {};
  if (kWhole) read = read_pack<T, kPerThread>(first);
  Four<float> values;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    if (!kWhole && i < count) read.at[i] = first[i];
    values.at[i] = load(read.at[i]);
  }
  return values;
}

template <bool kWhole, class T>
__device__ __forceinline__ void write_four(void* to, int64_t at, int64_t count, const Four<float>& values) {
  T* first = static_cast<T*>(to) + at;
  Four<T> rounded;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    store(&rounded.at[i], values.at[i]);
    if (!kWhole && i < count) first[i] = rounded.at[i];
  }
  if (kWhole) write_pack<T, kPerThread>(first, rounded);
}

template <class T, bool kWhole>
__global__ void __launch_bounds__(kThreads) diffuse_kernel(Diffuse args) {
  const int64_t block = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t count = args.numel - block * kPerThread;
  if (count <= 0) return;
  for (int64_t sample = blockIdx.y; sample < args.batch; sample += gridDim.y) {
    const int64_t at = sample * args.numel + block * kPerThread;
    const float* c = args.coefficients + 4 * sample;
    const auto x0 = read_four<kWhole, T>(args.x0, at, count);
    const auto noise = args.noise ? read_four<kWhole, T>(args.noise, at, count) : normals_of(args, sample, block);
    Four<float> x_t, target;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      x_t.at[i] = c[0] * x0.at[i] + c[1] * noise.at[i];
      target.at[i] = c[2] * noise.at[i] + c[3] * x0.at[i];
    }
    write_four<kWhole, T>(args.x_t, at, count, x_t);
    write_four<kWhole, T>(args.target, at, count, target);
  }
}

__global__ void __launch_bounds__(kThreads) philox_bits_kernel(PhiloxBits args) {
  const int64_t at = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= args.batch * args.numel) return;
  const int64_t sample = at / args.numel, element = at % args.numel;
  uint64_t words[kPerThread];
  const PhiloxStream stream = philox_stream(args.seed, args.step, args.purpose, args.sample_ids[sample]);
  philox_words(stream, uint64_t(element / kPerThread), Multiply{}, words);
  args.words[at] = uint32_t(words[element % kPerThread]);
}

template <class T, bool kWhole>
void launch(const Diffuse& args, Stream stream) {
  const unsigned columns = unsigned(ceil_divide(args.numel, kThreads * kPerThread));
  const dim3 grid(columns, unsigned(args.batch < kMaxGridRows ? args.batch : kMaxGridRows));
  MD_LAUNCH((diffuse_kernel<T, kWhole>), grid, kThreads, 0, stream, args);
}

}  // namespace

void diffuse(const Diffuse& args, Stream stream) {
  with_type(args.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const bool whole = can_take_packs<T>(args.numel, {args.x0, args.noise, args.x_t, args.target});
    whole ? launch<T, true>(args, stream) : launch<T, false>(args, stream);
  });
}

void philox_bits(const PhiloxBits& args, Stream stream) {
  MD_LAUNCH(philox_bits_kernel, unsigned(ceil_divide(args.batch * args.numel, kThreads)), kThreads, 0, stream, args);
}

}  // namespace megadiff::cuda
