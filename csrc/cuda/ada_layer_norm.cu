// Adaptive LayerNorm on CUDA: a warp a row forward; backward a block for a run of rows, so that the sums over tokens of
// scale and shift stay in the block and are added up in a fixed order.
#include "common/ada_layer_norm.h"

#include "cuda/rows.h"

namespace megadiff::cuda {
namespace {

// What one row keeps in shared memory at most, so that four warps fit without asking for more than 48 KiB.
constexpr int64_t kCachedWidth = 3072;
constexpr int kForwardWarps = 4;

template <class T, class P, int kPack>
__global__ void __launch_bounds__(kForwardWarps* kWarpSize) forward_kernel(AdaLayerNorm args) {
  MD_DYNAMIC_SHARED(float, cache);
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int64_t row = int64_t(blockIdx.x) * kForwardWarps + warp, width = args.width;
  if (row >= args.batch * args.tokens) return;  // a whole warp leaves, and no barrier follows
  const T* x = static_cast<const T*>(args.x) + row * width;
  const bool cached = width <= kCachedWidth;
  float* kept = cache + (cached ? warp * width : 0);
  float sum = 0.0f;
  for (int64_t d = lane * kPack; d < width; d += kWarpSize * kPack) {
    const Pack<T, kPack> pack = read_pack<T, kPack>(x + d);
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      const float value = load(pack.at[i]);
      sum += value;
      if (cached) kept[d + i] = value;  // each lane reads back only what it wrote
    }
  }
  const float mean = warp_sum(sum) / float(width);
  float squares = 0.0f;
  for (int64_t d = lane * kPack; d < width; d += kWarpSize * kPack) {
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      const float difference = (cached ? kept[d + i] : load(x[d + i])) - mean;
      squares += difference * difference;
    }
  }
  const float rstd = rsqrtf(warp_sum(squares) / float(width) + args.eps);
  const P* shift = static_cast<const P*>(args.shift) + row / args.tokens * args.shift_stride;
  const P* scale = static_cast<const P*>(args.scale) + row / args.tokens * args.scale_stride;
  T* y = static_cast<T*>(args.y) + row * width;
  for (int64_t d = lane * kPack; d < width; d += kWarpSize * kPack) {
    Pack<T, kPack> pack;
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      const float normed = ((cached ? kept[d + i] : load(x[d + i])) - mean) * rstd;
      store(&pack.at[i], normed * (1.0f + load(scale[d + i])) + load(shift[d + i]));
    }
    write_pack<T, kPack>(y + d, pack);
  }
  if (lane == 0) {
    args.mean[row] = mean;
    args.rstd[row] = rstd;
  }
}

// Block sample * splits + split takes kRowsPerBlock rows of a sample; thread t owns the packs t, t + kRowThreads, ... of each row,
// and with them the same columns of the block's sums, which lie in shared memory: shift_sum, then scale_sum.
template <class T, class P, int kPack>
__global__ void __launch_bounds__(kRowThreads) backward_kernel(AdaLayerNorm args, int64_t splits) {
  MD_DYNAMIC_SHARED(float, shift_sum);
  MD_SHARED(float, scratch, kRowWarps);
  const int64_t sample = blockIdx.x / splits, split = blockIdx.x % splits;
  const int64_t width = args.width, step = kRowThreads * kPack;
  float* scale_sum = shift_sum + width;
  const P* scale = static_cast<const P*>(args.scale) + sample * args.scale_stride;
  for (int64_t d = threadIdx.x * kPack; d < width; d += step)
    for (int i = 0; i < kPack; ++i) shift_sum[d + i] = scale_sum[d + i] = 0.0f;
  const int64_t start = split * kRowsPerBlock;
  const int64_t stop = start + kRowsPerBlock < args.tokens ? start + kRowsPerBlock : args.tokens;
  for (int64_t token = start; token < stop; ++token) {
    const int64_t row = sample * args.tokens + token;
    const T* x = static_cast<const T*>(args.x) + row * width;
    const T* grad = static_cast<const T*>(args.y_grad) + row * width;
    T* x_grad = static_cast<T*>(args.x_grad) + row * width;
    const float mean = args.mean[row], rstd = args.rstd[row];
    float sum = 0.0f, product = 0.0f;
    for (int64_t d = threadIdx.x * kPack; d < width; d += step) {
      const Pack<T, kPack> xs = read_pack<T, kPack>(x + d), gs = read_pack<T, kPack>(grad + d);
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        const float g = load(gs.at[i]), normed = (load(xs.at[i]) - mean) * rstd;
        const float h = g * (1.0f + load(scale[d + i]));
        sum += h;
        product += h * normed;
        shift_sum[d + i] += g;
        scale_sum[d + i] += g * normed;
      }
    }
    const float mean_h = block_sum(sum, scratch) / float(width);
    const float mean_product = block_sum(product, scratch) / float(width);
    for (int64_t d = threadIdx.x * kPack; d < width; d += step) {  // the row is in the L1 cache now
      const Pack<T, kPack> xs = read_pack<T, kPack>(x + d), gs = read_pack<T, kPack>(grad + d);
      Pack<T, kPack> out;
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        const float h = load(gs.at[i]) * (1.0f + load(scale[d + i]));
        store(&out.at[i], rstd * (h - mean_h - (load(xs.at[i]) - mean) * rstd * mean_product));
      }
      write_pack<T, kPack>(x_grad + d, out);
    }
  }
  float* partial = args.workspace + int64_t(blockIdx.x) * width;
  const int64_t half = args.batch * splits * width;
  for (int64_t d = threadIdx.x * kPack; d < width; d += step) {
    for (int i = 0; i < kPack; ++i) {
      partial[d + i] = shift_sum[d + i];
      partial[half + d + i] = scale_sum[d + i];
    }
  }
}

template <class T, class P, int kPack>
void launch_forward(const AdaLayerNorm& args, Stream stream) {
  const size_t shared = args.width <= kCachedWidth ? size_t(kForwardWarps) * args.width * sizeof(float) : 0;
  const unsigned blocks = unsigned(ceil_divide(args.batch * args.tokens, kForwardWarps));
  MD_LAUNCH((forward_kernel<T, P, kPack>), blocks, kForwardWarps * kWarpSize, shared, stream, args);
}

template <class T, class P, int kPack>
void launch_backward(const AdaLayerNorm& args, Stream stream) {
  const size_t shared = 2 * args.width * sizeof(float);
  const int64_t splits = ceil_divide(args.tokens, kRowsPerBlock);
  MD_ALLOW_SHARED((backward_kernel<T, P, kPack>), shared);
  MD_LAUNCH((backward_kernel<T, P, kPack>), unsigned(args.batch * splits), kRowThreads, shared, stream, args, splits);
}

}  // namespace

int64_t ada_layer_norm_workspace(const AdaLayerNorm& args) {
  return 2 * args.batch * ceil_divide(args.tokens, kRowsPerBlock) * args.width;
}

void ada_layer_norm_forward(const AdaLayerNorm& args, Stream stream) {
  with_row_packs(args.dtype, args.param_dtype, args.width, {args.x, args.y}, [&](auto type, auto param, auto packs) {
    using T = typename decltype(type)::type;
    launch_forward<T, typename decltype(param)::type, decltype(packs)::value>(args, stream);
  });
}

void ada_layer_norm_backward(const AdaLayerNorm& args, Stream stream) {
  with_row_packs(args.dtype, args.param_dtype, args.width, {args.x, args.y_grad, args.x_grad}, [&](auto type, auto param, auto packs) {
    using T = typename decltype(type)::type;
    launch_backward<T, typename decltype(param)::type, decltype(packs)::value>(args, stream);
  });
  const int64_t splits = ceil_divide(args.tokens, kRowsPerBlock);
  sum_splits(args.workspace, args.shift_grad, args.batch, args.width, splits, stream);
  sum_splits(args.workspace + args.batch * splits * args.width, args.scale_grad, args.batch, args.width, splits, stream);
}

}  // namespace megadiff::cuda
