// AdamW, the moving average of the weights and a low-precision copy of them in one pass over flat float32 shards.
#pragma once

#include "common/types.h"

namespace megadiff {

// g' = grad_scale g;  p *= 1 - lr weight_decay;  m += new_avg (g' - m);  v = beta2 v + new_sq g'^2
// p -= lr / bias_correction1 * m / (sqrt(v / bias_correction2) + eps);  ema += ema_weight (p - ema);  low = p
// new_avg = 1 - beta1 and new_sq = 1 - beta2 are given, because the difference of floats would be a millionth off.
struct AdamwEma {
  float* param;  // (numel), as all of them
  const float* grad;
  float* exp_avg;
  float* exp_avg_sq;
  float* ema;  // or null
  void* low;   // or null
  int64_t numel;
  float lr, new_avg, beta2, new_sq, eps, weight_decay, bias_correction1, bias_correction2, ema_weight, grad_scale;
  Dtype low_dtype;
};

namespace cpu {
void adamw_ema(const AdamwEma& args, Stream stream);
}
namespace cuda {
void adamw_ema(const AdamwEma& args, Stream stream);
}

}  // namespace megadiff
