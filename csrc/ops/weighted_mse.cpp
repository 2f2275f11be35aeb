// torch.ops.megadiff.weighted_mse and its backward.
#include "common/weighted_mse.h"

#include "binding.h"

namespace megadiff {
namespace {

int64_t elements_per_sample(const Tensor& tensor) {
  int64_t count = 1;
  for (int64_t dim = 1; dim < tensor.dim(); ++dim) count *= tensor.size(dim);
  return count;
}

WeightedMse checked(
    const Arguments& arguments, const Tensor& output, const Tensor& target, const Tensor& weight,
    const OptionalTensor& mask) {
  WeightedMse args{};
  args.output_dtype = arguments.dtype("output", output);
  arguments.require_dtype("target", target, {output.scalar_type(), ScalarType::Float});
  args.target_dtype = arguments.dtype("target", target);
  arguments.require_dtype("weight", weight, {ScalarType::Float});
  arguments.require(target.dim() >= 2, "target", "at least 2 dims", std::to_string(target.dim()));
  std::vector<int64_t> expected = shape_of(target);
  arguments.require(
      output.dim() == target.dim() && output.size(1) >= target.size(1), "output",
      "the shape of target " + to_text(expected) + " or one with more channels", to_text(shape_of(output)));
  expected[1] = output.size(1);
  arguments.require_shape("output", output, expected);
  arguments.require_shape("weight", weight, {target.size(0)});
  for (const auto& [name, tensor] : {std::pair{"output", output}, {"target", target}, {"weight", weight}}) {
    arguments.require_contiguous(name, tensor);
    arguments.require_same_device(name, tensor, output);
  }
  args.batch = target.size(0);
  args.numel = elements_per_sample(target);
  args.spatial = target.size(1) == 0 ? 0 : args.numel / target.size(1);
  args.output_stride = elements_per_sample(output);
  if (mask) {
    expected[1] = 1;
    arguments.require_dense("mask", *mask, expected, ScalarType::Bool, output);
  }
  args.output = read<void>(output);
  args.target = read<void>(target);
  args.weight = read<float>(weight);
  args.mask = read<bool>(mask);
  return args;
}

Tensor forward(const Tensor& output, const Tensor& target, const Tensor& weight, const OptionalTensor& mask) {
  const Arguments arguments("weighted_mse");
  WeightedMse args = checked(arguments, output, target, weight, mask);
  const OnDevice guard(output);
  const Tensor loss = new_floats(output, {args.batch});
  const Tensor workspace = new_floats(output, {device::weighted_mse_workspace(args)});
  args.loss = write<float>(loss);
  args.workspace = write<float>(workspace);
  if (args.batch > 0) device::weighted_mse_forward(args, current_stream(output));
  arguments.check_launch();
  return loss;
}

Tensor backward(
    const Tensor& loss_grad, const Tensor& output, const Tensor& target, const Tensor& weight,
    const OptionalTensor& mask) {
  const Arguments arguments("weighted_mse_backward");
  WeightedMse args = checked(arguments, output, target, weight, mask);
  arguments.require_dense("loss_grad", loss_grad, {args.batch}, ScalarType::Float, output);
  const OnDevice guard(output);
  const Tensor output_grad = new_empty(output, shape_of(output), output.scalar_type());
  args.loss_grad = read<float>(loss_grad);
  args.output_grad = write<void>(output_grad);
  if (output.numel() > 0) device::weighted_mse_backward(args, current_stream(output));
  arguments.check_launch();
  return output_grad;
}

}  // namespace
}  // namespace megadiff

MEGADIFF_IMPL(MEGADIFF_LIBRARY, MEGADIFF_KEY, m) {
  m.impl("weighted_mse", TORCH_BOX(&megadiff::forward));
  m.impl("weighted_mse_backward", TORCH_BOX(&megadiff::backward));
}
