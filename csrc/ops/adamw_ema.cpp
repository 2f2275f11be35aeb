// torch.ops.megadiff.adamw_ema_, which changes its tensors in place.
#include "common/adamw_ema.h"

#include <cmath>

#include "binding.h"

namespace megadiff {
namespace {

void check_shard(const Arguments& arguments, const char* name, const Tensor& shard, const Tensor& param) {
  arguments.require_dense(name, shard, shape_of(param), ScalarType::Float, param);
}

void adamw_ema(
    Tensor& param, const Tensor& grad, Tensor& exp_avg, Tensor& exp_avg_sq, const OptionalTensor& ema,
    const OptionalTensor& low, double lr, double beta1, double beta2, double eps, double weight_decay, int64_t step,
    double ema_weight, double grad_scale) {
  const Arguments arguments("adamw_ema_");
  check_shard(arguments, "param", param, param);
  check_shard(arguments, "grad", grad, param);
  check_shard(arguments, "exp_avg", exp_avg, param);
  check_shard(arguments, "exp_avg_sq", exp_avg_sq, param);
  if (ema) check_shard(arguments, "ema", *ema, param);
  arguments.require(step >= 1, "step", "at least 1", std::to_string(step));
  AdamwEma args{};
  if (low) {
    args.low_dtype = arguments.dtype("low", *low);
    arguments.require_dense("low", *low, shape_of(param), low->scalar_type(), param);
  }
  args.param = write<float>(param);
  args.grad = read<float>(grad);
  args.exp_avg = write<float>(exp_avg);
  args.exp_avg_sq = write<float>(exp_avg_sq);
  args.ema = write<float>(ema);
  args.low = write<void>(low);
  args.numel = param.numel();
  args.lr = float(lr);
  args.new_avg = float(1.0 - beta1);
  args.beta2 = float(beta2);
  args.new_sq = float(1.0 - beta2);
  args.eps = float(eps);
  args.weight_decay = float(weight_decay);
  args.bias_correction1 = float(1.0 - std::pow(beta1, double(step)));
  args.bias_correction2 = float(1.0 - std::pow(beta2, double(step)));
  args.ema_weight = float(ema_weight);
  args.grad_scale = float(grad_scale);
  const OnDevice guard(param);
  if (args.numel > 0) device::adamw_ema(args, current_stream(param));
  arguments.check_launch();
}

}  // namespace
}  // namespace megadiff

MEGADIFF_IMPL(MEGADIFF_LIBRARY, MEGADIFF_KEY, m) { m.impl("adamw_ema_", TORCH_BOX(&megadiff::adamw_ema)); }
