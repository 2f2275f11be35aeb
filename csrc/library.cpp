// The schemas of all operators, once for every device. The Python side of each is megadiff/ops/<op>.py.
#include "binding.h"

MEGADIFF_DEFINE(MEGADIFF_LIBRARY, m) {
  m.def("ada_layer_norm(Tensor x, Tensor shift, Tensor scale, float eps) -> (Tensor, Tensor, Tensor)");
  m.def(
      "ada_layer_norm_backward(Tensor y_grad, Tensor x, Tensor scale, Tensor mean, Tensor rstd) -> "
      "(Tensor, Tensor, Tensor)");
  m.def(
      "adamw_ema_(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!)? ema, "
      "Tensor(e!)? low, float lr, float beta1, float beta2, float eps, float weight_decay, int step, float ema_weight, "
      "float grad_scale) -> ()");
  m.def(
      "diffuse(Tensor x0, Tensor coefficients, Tensor sample_ids, int seed_low, int seed_high, int step, int purpose) -> "
      "(Tensor, Tensor)");
  m.def("diffuse_given(Tensor x0, Tensor noise, Tensor coefficients) -> (Tensor, Tensor)");
  m.def(
      "philox_bits(Tensor sample_ids, int seed_low, int seed_high, int step, int purpose, int count) -> Tensor");
  m.def("gated_residual(Tensor x, Tensor y, Tensor gate) -> Tensor");
  m.def("gated_residual_backward(Tensor out_grad, Tensor y, Tensor gate) -> (Tensor, Tensor)");
  m.def(
      "group_norm_silu(Tensor x, Tensor? weight, Tensor? bias, Tensor? offset, Tensor? scale, Tensor? shift, int groups, "
      "float eps, bool silu) -> (Tensor, Tensor, Tensor)");
  m.def(
      "group_norm_silu_backward(Tensor y_grad, Tensor x, Tensor? weight, Tensor? bias, Tensor? offset, Tensor? scale, "
      "Tensor? shift, Tensor mean, Tensor rstd, int groups, bool silu) -> "
      "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "solver_step(Tensor output, Tensor x, Tensor? x_last, Tensor? h1, Tensor? h2, Tensor? noise, float[] to_m, float clip, "
      "float[] next_weights, float[] corrector_weights, float? guidance, bool keep_m) -> (Tensor, Tensor, Tensor)");
  m.def("weighted_mse(Tensor output, Tensor target, Tensor weight, Tensor? mask) -> Tensor");
  m.def(
      "weighted_mse_backward(Tensor loss_grad, Tensor output, Tensor target, Tensor weight, Tensor? mask) -> Tensor");
}
