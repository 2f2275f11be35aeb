// torch.ops.megadiff.gated_residual and its backward.
#include "common/gated_residual.h"

#include "binding.h"

namespace megadiff {
namespace {

GatedResidual checked(const Arguments& arguments, const Tensor& y, const Tensor& gate) {
  GatedResidual args{};
  args.dtype = arguments.dtype("y", y);
  arguments.require(y.dim() == 3, "y", "3 dims (samples, tokens, features)", to_text(shape_of(y)));
  arguments.require_contiguous("y", y);
  arguments.require_dtype("gate", gate, {y.scalar_type(), ScalarType::Float});
  arguments.require_shape("gate", gate, {y.size(0), y.size(2)});
  arguments.require(has_adjacent_columns(gate), "gate", "adjacent features", "a stride between features");
  arguments.require_same_device("gate", gate, y);
  args.param_dtype = arguments.dtype("gate", gate);
  args.y = read<void>(y);
  args.gate = read<void>(gate);
  args.gate_stride = gate.stride(0);
  args.batch = y.size(0);
  args.tokens = y.size(1);
  args.width = y.size(2);
  return args;
}

Tensor forward(const Tensor& x, const Tensor& y, const Tensor& gate) {
  const Arguments arguments("gated_residual");
  GatedResidual args = checked(arguments, y, gate);
  arguments.require_dense("x", x, shape_of(y), y.scalar_type(), y);
  const OnDevice guard(y);
  const Tensor out = new_empty(x, shape_of(x), x.scalar_type());
  args.x = read<void>(x);
  args.out = write<void>(out);
  if (x.numel() > 0) device::gated_residual_forward(args, current_stream(x));
  arguments.check_launch();
  return out;
}

std::tuple<Tensor, Tensor> backward(const Tensor& out_grad, const Tensor& y, const Tensor& gate) {
  const Arguments arguments("gated_residual_backward");
  GatedResidual args = checked(arguments, y, gate);
  arguments.require_dense("out_grad", out_grad, shape_of(y), y.scalar_type(), y);
  const OnDevice guard(y);
  const Tensor y_grad = new_empty(y, shape_of(y), y.scalar_type());
  Tensor gate_grad = new_floats(y, {args.batch, args.width});
  const Tensor workspace = new_floats(y, {device::gated_residual_workspace(args)});
  args.out_grad = read<void>(out_grad);
  args.y_grad = write<void>(y_grad);
  args.gate_grad = write<float>(gate_grad);
  args.workspace = write<float>(workspace);
  if (y.numel() > 0) {
    device::gated_residual_backward(args, current_stream(y));
  } else {  // no tokens: sums of nothing
    torch::stable::zero_(gate_grad);
  }
  arguments.check_launch();
  return {y_grad, gate_grad};
}

}  // namespace
}  // namespace megadiff

MEGADIFF_IMPL(MEGADIFF_LIBRARY, MEGADIFF_KEY, m) {
  m.impl("gated_residual", TORCH_BOX(&megadiff::forward));
  m.impl("gated_residual_backward", TORCH_BOX(&megadiff::backward));
}
