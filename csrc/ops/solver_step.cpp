// torch.ops.megadiff.solver_step.
#include "common/solver_step.h"

#include "binding.h"

namespace megadiff {
namespace {

const void* optional_like(const Arguments& arguments, const char* name, const OptionalTensor& tensor, const Tensor& x) {
  if (tensor) arguments.require_dense(name, *tensor, shape_of(x), x.scalar_type(), x);
  return read<void>(tensor);
}

// (B or 2 B, C or more channels, ...) for x (B, C, ...).
void check_output(const Arguments& arguments, const Tensor& output, const Tensor& x, bool guided) {
  std::vector<int64_t> expected = shape_of(x);
  if (guided) expected[0] *= 2;
  const std::string shapes = to_text(expected) + " or more channels";
  arguments.require(
      output.dim() == x.dim() && output.size(1) >= x.size(1), "output", shapes, to_text(shape_of(output)));
  expected[1] = output.size(1);
  arguments.require(shape_of(output) == expected, "output", shapes, to_text(shape_of(output)));
  arguments.require_contiguous("output", output);
  arguments.require_same_device("output", output, x);
}

void take_weights(
    const Arguments& arguments, const char* name, const std::vector<double>& from, float* to, size_t count) {
  arguments.require(from.size() == count, name, std::to_string(count) + " numbers", std::to_string(from.size()));
  for (size_t i = 0; i < count; ++i) to[i] = float(from[i]);
}

std::tuple<Tensor, Tensor, Tensor> solver_step(
    const Tensor& output, const Tensor& x, const OptionalTensor& x_last, const OptionalTensor& h1,
    const OptionalTensor& h2, const OptionalTensor& noise, const std::vector<double>& to_m, double clip,
    const std::vector<double>& next_weights, const std::vector<double>& corrector_weights,
    std::optional<double> guidance, bool keep_m) {
  const Arguments arguments("solver_step");
  SolverStep args{};
  args.dtype = arguments.dtype("x", x);
  args.output_dtype = arguments.dtype("output", output);
  arguments.require(args.dtype == Dtype::kFloat32 || args.dtype == args.output_dtype, "x",
                    "float32 or the dtype of output", to_text(x.scalar_type()));
  arguments.require(x.dim() >= 2, "x", "at least 2 dims (samples, channels, ...)", to_text(shape_of(x)));
  arguments.require_contiguous("x", x);
  args.guided = guidance.has_value();
  check_output(arguments, output, x, args.guided);
  args.corrector = !corrector_weights.empty();
  arguments.require(!args.corrector || x_last, "x_last", "a tensor, because there are corrector_weights", "none");
  float pair[2];
  take_weights(arguments, "to_m", to_m, pair, 2);
  take_weights(arguments, "next_weights", next_weights, args.next_weights, 5);
  if (args.corrector) take_weights(arguments, "corrector_weights", corrector_weights, args.corrector_weights, 4);
  args.x_to_m = pair[0];
  args.output_to_m = pair[1];
  args.guidance = float(guidance.value_or(1.0));
  args.clip = float(clip);
  args.output = read<void>(output);
  args.x = read<void>(x);
  args.x_last = optional_like(arguments, "x_last", x_last, x);
  args.h1 = optional_like(arguments, "h1", h1, x);
  args.h2 = optional_like(arguments, "h2", h2, x);
  args.noise = optional_like(arguments, "noise", noise, x);
  args.batch = x.size(0);
  args.numel = args.batch == 0 ? 0 : x.numel() / args.batch;
  args.output_stride = output.size(0) == 0 ? 0 : output.numel() / output.size(0);
  const OnDevice guard(x);
  const auto new_like_x = [&x](bool wanted) {
    return wanted ? torch::stable::empty_like(x) : new_empty(x, {0}, x.scalar_type());
  };
  const Tensor next = new_like_x(true), m = new_like_x(keep_m), base = new_like_x(args.corrector);
  args.next = write<void>(next);
  args.m = keep_m ? write<void>(m) : nullptr;
  args.base = write<void>(base);
  if (x.numel() > 0) device::solver_step(args, current_stream(x));
  arguments.check_launch();
  return {next, m, base};
}

}  // namespace
}  // namespace megadiff

MEGADIFF_IMPL(MEGADIFF_LIBRARY, MEGADIFF_KEY, m) { m.impl("solver_step", TORCH_BOX(&megadiff::solver_step)); }
