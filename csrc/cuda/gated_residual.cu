// Gated residual on CUDA: element-wise forward; backward a block for a run of rows, as in ada_layer_norm.cu.
#include "common/gated_residual.h"

#include "cuda/rows.h"

namespace megadiff::cuda {
namespace {

template <class T, class P, int kPack>
__global__ void __launch_bounds__(kRowThreads) forward_kernel(GatedResidual args, int64_t count) {
  const int64_t at = (int64_t(blockIdx.x) * kRowThreads + threadIdx.x) * kPack;
  if (at >= count) return;
  const int64_t row = at / args.width, d = at % args.width;
  const P* gate = static_cast<const P*>(args.gate) + row / args.tokens * args.gate_stride + d;
  const auto xs = read_pack<T, kPack>(static_cast<const T*>(args.x) + at);
  const auto ys = read_pack<T, kPack>(static_cast<const T*>(args.y) + at);
  Pack<T, kPack> out;
#pragma unroll
  for (int i = 0; i < kPack; ++i) store(&out.at[i], load(xs.at[i]) + load(gate[i]) * load(ys.at[i]));
  write_pack<T, kPack>(static_cast<T*>(args.out) + at, out);
}

// Block (sample * splits + split, strip of columns); thread t owns one pack of columns and walks down the rows.
template <class T, class P, int kPack>
__global__ void __launch_bounds__(kRowThreads) backward_kernel(GatedResidual args, int64_t splits) {
  const int64_t sample = blockIdx.x / splits, split = blockIdx.x % splits, width = args.width;
  const int64_t d = (int64_t(blockIdx.y) * kRowThreads + threadIdx.x) * kPack;
  if (d >= width) return;
  const P* gate = static_cast<const P*>(args.gate) + sample * args.gate_stride + d;
  const int64_t start = split * kRowsPerBlock;
  const int64_t stop = start + kRowsPerBlock < args.tokens ? start + kRowsPerBlock : args.tokens;
  float sum[kPack] = {};
  for (int64_t token = start; token < stop; ++token) {
    const int64_t at = (sample * args.tokens + token) * width + d;
    const auto grads = read_pack<T, kPack>(static_cast<const T*>(args.out_grad) + at);
    const auto ys = read_pack<T, kPack>(static_cast<const T*>(args.y) + at);
    Pack<T, kPack> out;
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      const float g = load(grads.at[i]);
      sum[i] += g * load(ys.at[i]);
      store(&out.at[i], g * load(gate[i]));
    }
    write_pack<T, kPack>(static_cast<T*>(args.y_grad) + at, out);
  }
  float* partial = args.workspace + int64_t(blockIdx.x) * width + d;
#pragma unroll
  for (int i = 0; i < kPack; ++i) partial[i] = sum[i];
}

template <class T, class P, int kPack>
void launch_forward(const GatedResidual& args, Stream stream) {
  const int64_t count = args.batch * args.tokens * args.width;
  const unsigned blocks = unsigned(ceil_divide(count, kRowThreads * kPack));
  MD_LAUNCH((forward_kernel<T, P, kPack>), blocks, kRowThreads, 0, stream, args, count);
}

template <class T, class P, int kPack>
void launch_backward(const GatedResidual& args, Stream stream) {
  const int64_t splits = ceil_divide(args.tokens, kRowsPerBlock);
  const unsigned strips = unsigned(ceil_divide(args.width, kRowThreads * kPack));
  MD_LAUNCH((backward_kernel<T, P, kPack>), dim3(unsigned(args.batch * splits), strips), kRowThreads, 0, stream, args,
            splits);
}

}  // namespace

int64_t gated_residual_workspace(const GatedResidual& args) {
  return args.batch * ceil_divide(args.tokens, kRowsPerBlock) * args.width;
}

void gated_residual_forward(const GatedResidual& args, Stream stream) {
  with_row_packs(args.dtype, args.param_dtype, args.width, {args.x, args.y, args.out}, [&](auto type, auto param, auto packs) {
    using T = typename decltype(type)::type;
    launch_forward<T, typename decltype(param)::type, decltype(packs)::value>(args, stream);
  });
}

void gated_residual_backward(const GatedResidual& args, Stream stream) {
  with_row_packs(args.dtype, args.param_dtype, args.width, {args.y, args.out_grad, args.y_grad}, [&](auto type, auto param, auto packs) {
    using T = typename decltype(type)::type;
    launch_backward<T, typename decltype(param)::type, decltype(packs)::value>(args, stream);
  });
  const int64_t splits = ceil_divide(args.tokens, kRowsPerBlock);
  sum_splits(args.workspace, args.gate_grad, args.batch, args.width, splits, stream);
}

}  // namespace megadiff::cuda
