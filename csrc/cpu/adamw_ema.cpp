// AdamW and the moving average of the weights on the CPU, in one pass.
#include "common/adamw_ema.h"

#include "common/parallel.h"
#include "cpu/element_types.h"

namespace megadiff::cpu::MEGADIFF_ISA {
namespace {

template <bool kEma, bool kLow, class Low>
void update(const AdamwEma& args, int64_t begin, int64_t end) {
  float* __restrict param = args.param;
  const float* __restrict grad = args.grad;
  float* __restrict exp_avg = args.exp_avg;
  float* __restrict exp_avg_sq = args.exp_avg_sq;
  float* __restrict ema = args.ema;
  Low* __restrict low = static_cast<Low*>(args.low);
  // Local copies: the compiler must assume that a store to a shard changes `args`.
  const float grad_scale = args.grad_scale, beta2 = args.beta2, eps = args.eps, ema_weight = args.ema_weight;
  const float keep = 1.0f - args.lr * args.weight_decay, new_avg = args.new_avg, new_sq = args.new_sq;
  const float rate = args.lr / args.bias_correction1, root_scale = 1.0f / std::sqrt(args.bias_correction2);
  MEGADIFF_SIMD
  for (int64_t i = begin; i < end; ++i) {
    const float g = grad_scale * grad[i];
    const float avg = exp_avg[i] + new_avg * (g - exp_avg[i]);
    const float square = beta2 * exp_avg_sq[i] + new_sq * (g * g);
    const float value = param[i] * keep - rate * (avg / (std::sqrt(square) * root_scale + eps));
    exp_avg[i] = avg;
    exp_avg_sq[i] = square;
    param[i] = value;
    if (kEma) ema[i] += ema_weight * (value - ema[i]);
    if (kLow) store(low + i, value);
  }
}

template <bool kEma>
void update_with(const AdamwEma& args, int64_t begin, int64_t end) {
  if (!args.low) return update<kEma, false, float>(args, begin, end);
  with_type(args.low_dtype, [&](auto type) { update<kEma, true, typename decltype(type)::type>(args, begin, end); });
}

}  // namespace

void adamw_ema(const AdamwEma& args) {
  parallel_for(args.numel, kGrainElements, [&](int64_t begin, int64_t end) {
    args.ema ? update_with<true>(args, begin, end) : update_with<false>(args, begin, end);
  });
}

}  // namespace megadiff::cpu::MEGADIFF_ISA
