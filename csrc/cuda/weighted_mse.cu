// Weighted squared error a sample on CUDA: blocks sum parts of a sample, a second launch adds the parts in order.
#include "common/weighted_mse.h"

#include "cuda/rows.h"

namespace megadiff::cuda {
namespace {

// Elements of a sample that one block sums.
constexpr int64_t kElementsPerBlock = 16 * kRowThreads;

__device__ __forceinline__ bool is_counted(const WeightedMse& args, int64_t sample, int64_t i) {
  return args.mask == nullptr || args.mask[sample * args.spatial + i % args.spatial];
}

template <class Output, class Target>
__device__ __forceinline__ float difference(const WeightedMse& args, int64_t sample, int64_t i) {
  return load(static_cast<const Output*>(args.output)[sample * args.output_stride + i]) -
         load(static_cast<const Target*>(args.target)[sample * args.numel + i]);
}

// A masked element counts nothing, whatever it holds: it may be NaN, so it is selected away, not multiplied by 0.
template <class Output, class Target>
__global__ void __launch_bounds__(kRowThreads) partial_kernel(WeightedMse args, int64_t parts) {
  MD_SHARED(float, scratch, kRowWarps);
  const int64_t sample = blockIdx.x / parts, start = blockIdx.x % parts * kElementsPerBlock;
  const int64_t stop = start + kElementsPerBlock < args.numel ? start + kElementsPerBlock : args.numel;
  float sum = 0.0f;
  for (int64_t i = start + threadIdx.x; i < stop; i += kRowThreads) {
    const float error = difference<Output, Target>(args, sample, i);
    if (is_counted(args, sample, i)) sum += error * error;
  }
  const float total = block_sum(sum, scratch);
  if (threadIdx.x == 0) args.workspace[blockIdx.x] = total;
}

__global__ void __launch_bounds__(kRowThreads) finish_kernel(WeightedMse args, int64_t parts) {
  const int64_t sample = int64_t(blockIdx.x) * kRowThreads + threadIdx.x;
  if (sample >= args.batch) return;
  float sum = 0.0f;
  for (int64_t part = 0; part < parts; ++part) sum += args.workspace[sample * parts + part];
  args.loss[sample] = args.weight[sample] * sum;
}

template <class Output, class Target>
__global__ void __launch_bounds__(kRowThreads) backward_kernel(WeightedMse args, int64_t count) {
  const int64_t at = int64_t(blockIdx.x) * kRowThreads + threadIdx.x;
  if (at >= count) return;
  const int64_t sample = at / args.output_stride, i = at % args.output_stride;
  float grad = 0.0f;
  if (i < args.numel && is_counted(args, sample, i))
    grad = 2.0f * args.weight[sample] * args.loss_grad[sample] * difference<Output, Target>(args, sample, i);
  store(static_cast<Output*>(args.output_grad) + at, grad);
}

int64_t parts_of(const WeightedMse& args) { return ceil_divide(args.numel, kElementsPerBlock); }

}  // namespace

int64_t weighted_mse_workspace(const WeightedMse& args) { return args.batch * parts_of(args); }

void weighted_mse_forward(const WeightedMse& args, Stream stream) {
  const int64_t parts = parts_of(args);
  if (parts > 0) {
    with_types(args.output_dtype, args.target_dtype, [&](auto output, auto target) {
      MD_LAUNCH((partial_kernel<typename decltype(output)::type, typename decltype(target)::type>),
                unsigned(args.batch * parts), kRowThreads, 0, stream, args, parts);
    });
  }
  MD_LAUNCH(finish_kernel, unsigned(ceil_divide(args.batch, kRowThreads)), kRowThreads, 0, stream, args, parts);
}

void weighted_mse_backward(const WeightedMse& args, Stream stream) {
  with_types(args.output_dtype, args.target_dtype, [&](auto output, auto target) {
    const int64_t count = args.batch * args.output_stride;
    MD_LAUNCH((backward_kernel<typename decltype(output)::type, typename decltype(target)::type>),
              unsigned(ceil_divide(count, kRowThreads)), kRowThreads, 0, stream, args, count);
  });
}

}  // namespace megadiff::cuda
