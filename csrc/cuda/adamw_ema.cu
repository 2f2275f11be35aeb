// AdamW and the moving average of the weights on CUDA, in one pass; four elements a thread where the shards are aligned.
#include "common/adamw_ema.h"

#include "cuda/element_types.h"

namespace megadiff::cuda {
namespace {

constexpr int kThreads = 256;

template <class Low, int kPack>
__global__ void __launch_bounds__(kThreads) adamw_ema_kernel(AdamwEma args, float rate, float root_scale) {
  const int64_t at = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * kPack;
  if (at >= args.numel) return;
  using Floats = Pack<float, kPack>;
  Floats& param = reinterpret_cast<Floats*>(args.param + at)[0];
  Floats& exp_avg = reinterpret_cast<Floats*>(args.exp_avg + at)[0];
  Floats& exp_avg_sq = reinterpret_cast<Floats*>(args.exp_avg_sq + at)[0];
  Floats p = param, m = exp_avg, v = exp_avg_sq, average = {};
  const Floats grad = reinterpret_cast<const Floats*>(args.grad + at)[0];
  if (args.ema) average = reinterpret_cast<const Floats*>(args.ema + at)[0];
  Pack<Low, kPack> low;
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    const float g = args.grad_scale * grad.at[i];
    m.at[i] += args.new_avg * (g - m.at[i]);
    v.at[i] = args.beta2 * v.at[i] + args.new_sq * (g * g);
    const float update = m.at[i] / (sqrtf(v.at[i]) * root_scale + args.eps);
    p.at[i] = p.at[i] * (1.0f - args.lr * args.weight_decay) - rate * update;
    average.at[i] += args.ema_weight * (p.at[i] - average.at[i]);
    store(&low.at[i], p.at[i]);
  }
  param = p;
  exp_avg = m;
  exp_avg_sq = v;
  if (args.ema) reinterpret_cast<Floats*>(args.ema + at)[0] = average;
  if (args.low) reinterpret_cast<Pack<Low, kPack>*>(static_cast<Low*>(args.low) + at)[0] = low;
}

template <class Low, int kPack>
void launch(const AdamwEma& args, Stream stream) {
  const float rate = args.lr / args.bias_correction1, root_scale = 1.0f / std::sqrt(args.bias_correction2);
  const unsigned blocks = unsigned(ceil_divide(args.numel, int64_t(kThreads) * kPack));
  MD_LAUNCH((adamw_ema_kernel<Low, kPack>), blocks, kThreads, 0, stream, args, rate, root_scale);
}

// Whether all shards can be read four elements at a time.
bool is_aligned(const AdamwEma& args, size_t low_bytes) {
  const uintptr_t floats = reinterpret_cast<uintptr_t>(args.param) | reinterpret_cast<uintptr_t>(args.grad) |
                           reinterpret_cast<uintptr_t>(args.exp_avg) | reinterpret_cast<uintptr_t>(args.exp_avg_sq) |
                           reinterpret_cast<uintptr_t>(args.ema);
  return args.numel % 4 == 0 && floats % 16 == 0 && reinterpret_cast<uintptr_t>(args.low) % (4 * low_bytes) == 0;
}

}  // namespace

void adamw_ema(const AdamwEma& args, Stream stream) {
  with_type(args.low_dtype, [&](auto type) {
    using Low = typename decltype(type)::type;
    is_aligned(args, sizeof(Low)) ? launch<Low, 4>(args, stream) : launch<Low, 1>(args, stream);
  });
}

}  // namespace megadiff::cuda
