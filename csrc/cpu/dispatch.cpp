// One line a CPU kernel: the version for this machine's instruction set.
#include "cpu/dispatch.h"

#include "common/ada_layer_norm.h"
#include "common/adamw_ema.h"
#include "common/diffuse.h"
#include "common/gated_residual.h"
#include "common/group_norm_silu.h"
#include "common/solver_step.h"
#include "common/weighted_mse.h"

namespace megadiff::cpu {

Isa widest_isa() {
#ifdef MEGADIFF_X86
  static const Isa widest = [] {
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return avx2 ? (avx512 ? Isa::kAvx512 : Isa::kAvx2) : Isa::kBaseline;
  }();
  return widest;
#else
  return Isa::kBaseline;
#endif
}

int64_t ada_layer_norm_workspace(const AdaLayerNorm& args) { return 2 * args.batch * args.width; }
int64_t gated_residual_workspace(const GatedResidual& args) { return args.batch * args.width; }
int64_t weighted_mse_workspace(const WeightedMse&) { return 0; }

}  // namespace megadiff::cpu

MEGADIFF_DISPATCH(AdamwEma, adamw_ema)
MEGADIFF_DISPATCH(AdaLayerNorm, ada_layer_norm_forward)
MEGADIFF_DISPATCH(AdaLayerNorm, ada_layer_norm_backward)
MEGADIFF_DISPATCH(Diffuse, diffuse)
MEGADIFF_DISPATCH(PhiloxBits, philox_bits)
MEGADIFF_DISPATCH(GatedResidual, gated_residual_forward)
MEGADIFF_DISPATCH(GatedResidual, gated_residual_backward)
MEGADIFF_DISPATCH(GroupNormSilu, group_norm_silu_forward)
MEGADIFF_DISPATCH(GroupNormSilu, group_norm_silu_backward)
MEGADIFF_WORKSPACE(GroupNormSilu, group_norm_silu_forward_workspace)
MEGADIFF_WORKSPACE(GroupNormSilu, group_norm_silu_backward_workspace)
MEGADIFF_DISPATCH(SolverStep, solver_step)
MEGADIFF_DISPATCH(WeightedMse, weighted_mse_forward)
MEGADIFF_DISPATCH(WeightedMse, weighted_mse_backward)
