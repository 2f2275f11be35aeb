// torch.ops.megadiff.diffuse, diffuse_given and philox_bits.
#include "common/diffuse.h"

#include "binding.h"

namespace megadiff {
namespace {

Diffuse checked(const Arguments& arguments, const Tensor& x0, const Tensor& coefficients) {
  Diffuse args{};
  args.dtype = arguments.dtype("x0", x0);
  arguments.require(x0.dim() >= 1, "x0", "at least 1 dim (samples)", "a scalar");
  arguments.require_contiguous("x0", x0);
  arguments.require_dense("coefficients", coefficients, {x0.size(0), 4}, ScalarType::Float, x0);
  args.x0 = read<void>(x0);
  args.coefficients = read<float>(coefficients);
  args.batch = x0.size(0);
  args.numel = args.batch == 0 ? 0 : x0.numel() / args.batch;
  return args;
}

std::tuple<Tensor, Tensor> run(const Arguments& arguments, Diffuse& args, const Tensor& x0) {
  const OnDevice guard(x0);
  const Tensor x_t = torch::stable::empty_like(x0), target = torch::stable::empty_like(x0);
  args.x_t = write<void>(x_t);
  args.target = write<void>(target);
  if (x0.numel() > 0) device::diffuse(args, current_stream(x0));
  arguments.check_launch();
  return {x_t, target};
}

uint32_t checked_word(const Arguments& arguments, const char* name, int64_t value) {
  arguments.require(value >= 0 && value < int64_t(1) << 32, name, std::string("0 <= ") + name + " < 2**32",
                    std::to_string(value));
  return uint32_t(value);
}

// What fixes a stream. The seed comes as its two halves, because a schema's integers are signed.
template <class Args>
void take_stream(
    const Arguments& arguments, int64_t seed_low, int64_t seed_high, int64_t step, int64_t purpose, Args* args) {
  const uint64_t high = checked_word(arguments, "seed_high", seed_high);
  args->seed = high << 32 | checked_word(arguments, "seed_low", seed_low);
  args->step = checked_word(arguments, "step", step);
  arguments.require(purpose >= 0 && purpose < 256, "purpose", "0 <= purpose < 256", std::to_string(purpose));
  args->purpose = uint32_t(purpose);
}

std::tuple<Tensor, Tensor> diffuse(
    const Tensor& x0, const Tensor& coefficients, const Tensor& sample_ids, int64_t seed_low, int64_t seed_high,
    int64_t step, int64_t purpose) {
  const Arguments arguments("diffuse");
  Diffuse args = checked(arguments, x0, coefficients);
  arguments.require_dense("sample_ids", sample_ids, {args.batch}, ScalarType::Long, x0);
  args.sample_ids = read<int64_t>(sample_ids);
  take_stream(arguments, seed_low, seed_high, step, purpose, &args);
  return run(arguments, args, x0);
}

std::tuple<Tensor, Tensor> diffuse_given(const Tensor& x0, const Tensor& noise, const Tensor& coefficients) {
  const Arguments arguments("diffuse_given");
  Diffuse args = checked(arguments, x0, coefficients);
  arguments.require_dense("noise", noise, shape_of(x0), x0.scalar_type(), x0);
  args.noise = read<void>(noise);
  return run(arguments, args, x0);
}

Tensor philox_bits(
    const Tensor& sample_ids, int64_t seed_low, int64_t seed_high, int64_t step, int64_t purpose, int64_t count) {
  const Arguments arguments("philox_bits");
  arguments.require(sample_ids.dim() == 1, "sample_ids", "1 dim", std::to_string(sample_ids.dim()));
  PhiloxBits args{};
  args.batch = sample_ids.size(0);
  arguments.require_dense("sample_ids", sample_ids, {args.batch}, ScalarType::Long, sample_ids);
  args.sample_ids = read<int64_t>(sample_ids);
  arguments.require(count >= 0, "count", "0 or more", std::to_string(count));
  args.numel = count;
  take_stream(arguments, seed_low, seed_high, step, purpose, &args);
  const OnDevice guard(sample_ids);
  const Tensor words = new_empty(sample_ids, {args.batch, count}, ScalarType::Long);
  args.words = write<int64_t>(words);
  if (words.numel() > 0) device::philox_bits(args, current_stream(sample_ids));
  arguments.check_launch();
  return words;
}

}  // namespace
}  // namespace megadiff

MEGADIFF_IMPL(MEGADIFF_LIBRARY, MEGADIFF_KEY, m) {
  m.impl("diffuse", TORCH_BOX(&megadiff::diffuse));
  m.impl("diffuse_given", TORCH_BOX(&megadiff::diffuse_given));
  m.impl("philox_bits", TORCH_BOX(&megadiff::philox_bits));
}
