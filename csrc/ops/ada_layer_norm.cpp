// torch.ops.megadiff.ada_layer_norm and its backward.
#include "common/ada_layer_norm.h"

#include "binding.h"

namespace megadiff {
namespace {

// (B, D) in x's dtype or float32, rows at any distance.
Dtype check_vectors(const Arguments& arguments, const char* name, const Tensor& vectors, const Tensor& x) {
  arguments.require_dtype(name, vectors, {x.scalar_type(), ScalarType::Float});
  arguments.require_shape(name, vectors, {x.size(0), x.size(2)});
  arguments.require(has_adjacent_columns(vectors), name, "adjacent features", "a stride between features");
  arguments.require_same_device(name, vectors, x);
  return arguments.dtype(name, vectors);
}

AdaLayerNorm checked(const Arguments& arguments, const Tensor& x, const Tensor& scale) {
  AdaLayerNorm args{};
  args.dtype = arguments.dtype("x", x);
  arguments.require(x.dim() == 3, "x", "3 dims (samples, tokens, features)", to_text(shape_of(x)));
  arguments.require(x.size(2) > 0, "x", "at least one feature", to_text(shape_of(x)));
  arguments.require_contiguous("x", x);
  args.param_dtype = check_vectors(arguments, "scale", scale, x);
  args.x = read<void>(x);
  args.scale = read<void>(scale);
  args.scale_stride = scale.stride(0);
  args.batch = x.size(0);
  args.tokens = x.size(1);
  args.width = x.size(2);
  return args;
}

std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& x, const Tensor& shift, const Tensor& scale, double eps) {
  const Arguments arguments("ada_layer_norm");
  AdaLayerNorm args = checked(arguments, x, scale);
  check_vectors(arguments, "shift", shift, x);
  arguments.require_dtype("shift", shift, {scale.scalar_type()});
  const OnDevice guard(x);
  const Tensor y = new_empty(x, shape_of(x), x.scalar_type());
  const Tensor mean = new_floats(x, {args.batch, args.tokens}), rstd = new_floats(x, {args.batch, args.tokens});
  args.shift = read<void>(shift);
  args.shift_stride = shift.stride(0);
  args.y = write<void>(y);
  args.mean = write<float>(mean);
  args.rstd = write<float>(rstd);
  args.eps = float(eps);
  if (x.numel() > 0) device::ada_layer_norm_forward(args, current_stream(x));
  arguments.check_launch();
  return {y, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> backward(
    const Tensor& y_grad, const Tensor& x, const Tensor& scale, const Tensor& mean, const Tensor& rstd) {
  const Arguments arguments("ada_layer_norm_backward");
  AdaLayerNorm args = checked(arguments, x, scale);
  arguments.require_dense("y_grad", y_grad, shape_of(x), x.scalar_type(), x);
  arguments.require_dense("mean", mean, {args.batch, args.tokens}, ScalarType::Float, x);
  arguments.require_dense("rstd", rstd, {args.batch, args.tokens}, ScalarType::Float, x);
  const OnDevice guard(x);
  const Tensor x_grad = new_empty(x, shape_of(x), x.scalar_type());
  Tensor shift_grad = new_floats(x, {args.batch, args.width}), scale_grad = new_floats(x, {args.batch, args.width});
  const Tensor workspace = new_floats(x, {device::ada_layer_norm_workspace(args)});
  args.y_grad = read<void>(y_grad);
  args.mean = write<float>(mean);
  args.rstd = write<float>(rstd);
  args.x_grad = write<void>(x_grad);
  args.shift_grad = write<float>(shift_grad);
  args.scale_grad = write<float>(scale_grad);
  args.workspace = write<float>(workspace);
  if (x.numel() > 0) {
    device::ada_layer_norm_backward(args, current_stream(x));
  } else {  // no tokens: sums of nothing
    torch::stable::zero_(shift_grad);
    torch::stable::zero_(scale_grad);
  }
  arguments.check_launch();
  return {x_grad, shift_grad, scale_grad};
}

}  // namespace
}  // namespace megadiff

MEGADIFF_IMPL(MEGADIFF_LIBRARY, MEGADIFF_KEY, m) {
  m.impl("ada_layer_norm", TORCH_BOX(&megadiff::forward));
  m.impl("ada_layer_norm_backward", TORCH_BOX(&megadiff::backward));
}
