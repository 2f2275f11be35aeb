// torch.ops.megadiff.group_norm_silu and its backward.
#include "common/group_norm_silu.h"

#include "binding.h"

namespace megadiff {
namespace {

// Adjacent channels, then the spatial dims as in a contiguous tensor: torch's channels_last for any number of dims.
bool is_channels_last(const Tensor& x) {
  const int64_t dims = x.dim();
  int64_t expected = 1;
  for (int64_t step = 0; step < dims; ++step) {
    const int64_t dim = step == 0 ? 1 : step == dims - 1 ? 0 : dims - step;
    if (x.size(dim) != 1 && x.stride(dim) != expected) return false;
    expected *= x.size(dim);
  }
  return true;
}

void check_vector(const Arguments& arguments, const char* name, const OptionalTensor& vector, const Tensor& x) {
  if (!vector) return;
  arguments.require_dtype(name, *vector, {x.scalar_type(), ScalarType::Float});
  arguments.require_shape(name, *vector, {x.size(1)});
  arguments.require_contiguous(name, *vector);
  arguments.require_same_device(name, *vector, x);
}

void check_rows(const Arguments& arguments, const char* name, const OptionalTensor& rows, const Tensor& x) {
  if (!rows) return;
  arguments.require_dtype(name, *rows, {x.scalar_type(), ScalarType::Float});
  arguments.require_shape(name, *rows, {x.size(0), x.size(1)});
  arguments.require(has_adjacent_columns(*rows), name, "adjacent channels", "a stride between channels");
  arguments.require_same_device(name, *rows, x);
}

// The small tensors that ride along with x, each or none of them.
struct Parameters {
  const OptionalTensor &weight, &bias, &offset, &scale, &shift;
};

// The dtype of all parameters that are there; x's where there is none.
Dtype check_parameters(const Arguments& arguments, const Parameters& given, const Tensor& x) {
  check_vector(arguments, "weight", given.weight, x);
  check_vector(arguments, "bias", given.bias, x);
  check_rows(arguments, "offset", given.offset, x);
  check_rows(arguments, "scale", given.scale, x);
  check_rows(arguments, "shift", given.shift, x);
  const Tensor* first = nullptr;
  const std::pair<const char*, const OptionalTensor&> all[] = {
      {"weight", given.weight}, {"bias", given.bias}, {"offset", given.offset}, {"scale", given.scale},
      {"shift", given.shift}};
  for (const auto& [name, tensor] : all) {
    if (!tensor) continue;
    if (first) arguments.require_dtype(name, *tensor, {first->scalar_type()});
    first = &*tensor;
  }
  return arguments.dtype("x", first ? *first : x);
}

int64_t row_stride(const OptionalTensor& rows) { return rows ? rows->stride(0) : 0; }

GroupNormSilu checked(
    const Arguments& arguments, const Tensor& x, const Parameters& given, int64_t groups, bool silu) {
  GroupNormSilu args{};
  args.dtype = arguments.dtype("x", x);
  arguments.require(x.dim() >= 2, "x", "at least 2 dims (samples, channels, ...)", to_text(shape_of(x)));
  arguments.require(x.size(1) > 0, "x", "at least one channel", to_text(shape_of(x)));
  args.channels_last = !x.is_contiguous();
  arguments.require(
      !args.channels_last || is_channels_last(x), "x", "a contiguous or channels-last tensor", "other strides");
  arguments.require(groups > 0 && x.size(1) % groups == 0, "groups",
                    "a divisor of " + std::to_string(x.size(1)) + " channels", std::to_string(groups));
  args.param_dtype = check_parameters(arguments, given, x);
  args.x = read<void>(x);
  args.weight = read<void>(given.weight);
  args.bias = read<void>(given.bias);
  args.offset = read<void>(given.offset);
  args.scale = read<void>(given.scale);
  args.shift = read<void>(given.shift);
  args.offset_stride = row_stride(given.offset);
  args.scale_stride = row_stride(given.scale);
  args.shift_stride = row_stride(given.shift);
  args.batch = x.size(0);
  args.channels = x.size(1);
  args.groups = groups;
  args.spatial = 1;
  for (int64_t dim = 2; dim < x.dim(); ++dim) args.spatial *= x.size(dim);
  args.silu = silu;
  return args;
}

std::tuple<Tensor, Tensor, Tensor> forward(
    const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias, const OptionalTensor& offset,
    const OptionalTensor& scale, const OptionalTensor& shift, int64_t groups, double eps, bool silu) {
  const Arguments arguments("group_norm_silu");
  GroupNormSilu args = checked(arguments, x, {weight, bias, offset, scale, shift}, groups, silu);
  const OnDevice guard(x);
  const Tensor y = torch::stable::empty_like(x);
  Tensor mean = new_floats(x, {args.batch, groups}), rstd = new_floats(x, {args.batch, groups});
  args.eps = float(eps);
  args.y = write<void>(y);
  args.mean = write<float>(mean);
  args.rstd = write<float>(rstd);
  if (x.numel() > 0) {
    const Tensor workspace = new_floats(x, {device::group_norm_silu_forward_workspace(args)});
    args.workspace = write<float>(workspace);
    device::group_norm_silu_forward(args, current_stream(x));
  } else {  // no positions: statistics of nothing
    torch::stable::zero_(mean);
    torch::stable::zero_(rstd);
  }
  arguments.check_launch();
  return {y, mean, rstd};
}

// The float32 gradient of a parameter, or an empty tensor where there is no parameter.
Tensor parameter_gradient(const Tensor& x, const OptionalTensor& parameter) {
  return new_floats(x, parameter ? shape_of(*parameter) : std::vector<int64_t>{0});
}

float* write_if(const Tensor& gradient, const OptionalTensor& parameter) {
  return parameter ? write<float>(gradient) : nullptr;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> backward(
    const Tensor& y_grad, const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
    const OptionalTensor& offset, const OptionalTensor& scale, const OptionalTensor& shift, const Tensor& mean,
    const Tensor& rstd, int64_t groups, bool silu) {
  const Arguments arguments("group_norm_silu_backward");
  GroupNormSilu args = checked(arguments, x, {weight, bias, offset, scale, shift}, groups, silu);
  arguments.require_shape("y_grad", y_grad, shape_of(x));
  arguments.require_dtype("y_grad", y_grad, {x.scalar_type()});
  arguments.require_same_device("y_grad", y_grad, x);
  arguments.require(args.channels_last ? is_channels_last(y_grad) : y_grad.is_contiguous(), "y_grad",
                    "the memory layout of x", "other strides");
  arguments.require_dense("mean", mean, {args.batch, groups}, ScalarType::Float, x);
  arguments.require_dense("rstd", rstd, {args.batch, groups}, ScalarType::Float, x);
  const OnDevice guard(x);
  const Tensor x_grad = torch::stable::empty_like(x);
  Tensor weight_grad = parameter_gradient(x, weight), bias_grad = parameter_gradient(x, bias);
  Tensor offset_grad = parameter_gradient(x, offset), scale_grad = parameter_gradient(x, scale);
  Tensor shift_grad = parameter_gradient(x, shift);
  args.y_grad = read<void>(y_grad);
  args.mean = write<float>(mean);
  args.rstd = write<float>(rstd);
  args.x_grad = write<void>(x_grad);
  args.weight_grad = write_if(weight_grad, weight);
  args.bias_grad = write_if(bias_grad, bias);
  args.offset_grad = write_if(offset_grad, offset);
  args.scale_grad = write_if(scale_grad, scale);
  args.shift_grad = write_if(shift_grad, shift);
  if (x.numel() > 0) {
    const Tensor workspace = new_floats(x, {device::group_norm_silu_backward_workspace(args)});
    args.workspace = write<float>(workspace);
    device::group_norm_silu_backward(args, current_stream(x));
  } else {  // no positions: sums of nothing
    for (Tensor* gradient : {&weight_grad, &bias_grad, &offset_grad, &scale_grad, &shift_grad})
      torch::stable::zero_(*gradient);
  }
  arguments.check_launch();
  return {x_grad, weight_grad, bias_grad, offset_grad, scale_grad, shift_grad};
}

}  // namespace
}  // namespace megadiff

MEGADIFF_IMPL(MEGADIFF_LIBRARY, MEGADIFF_KEY, m) {
  m.impl("group_norm_silu", TORCH_BOX(&megadiff::forward));
  m.impl("group_norm_silu_backward", TORCH_BOX(&megadiff::backward));
}
