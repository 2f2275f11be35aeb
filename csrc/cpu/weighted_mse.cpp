// Weighted squared error a sample and its gradient on the CPU.
#include "common/weighted_mse.h"

#include "common/parallel.h"
#include "cpu/element_types.h"

namespace megadiff::cpu::MEGADIFF_ISA {
namespace {

// Partial sums of at most this many terms in float32; their sum is float64, so the error does not grow with the image.
constexpr int64_t kChunk = 1024;

template <class Output, class Target>
MEGADIFF_INLINE float squared_error(const Output* output, const Target* target, int64_t count) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) {
    const float error = load(output[i]) - load(target[i]);
    sum += error * error;
  }
  return sum;
}

// A masked element counts nothing, whatever it holds: it may be NaN, so it is selected away, not multiplied by 0.
template <class Output, class Target>
MEGADIFF_INLINE float masked_squared_error(
    const Output* output, const Target* target, const bool* mask, int64_t count) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) {
    const float error = load(output[i]) - load(target[i]);
    sum += mask[i] ? error * error : 0.0f;
  }
  return sum;
}

template <class Output, class Target>
float sample_loss(const WeightedMse& args, int64_t sample) {
  const Output* output = static_cast<const Output*>(args.output) + sample * args.output_stride;
  const Target* target = static_cast<const Target*>(args.target) + sample * args.numel;
  // Rows of `spatial` elements under a mask; one row of everything without.
  const int64_t row = args.mask ? args.spatial : args.numel;
  double sum = 0.0;
  for (int64_t start = 0; start < args.numel; start += row) {
    for (int64_t at = 0; at < row; at += kChunk) {
      const int64_t count = row - at < kChunk ? row - at : kChunk;
      const Output* o = output + start + at;
      const Target* t = target + start + at;
      sum += args.mask ? masked_squared_error(o, t, args.mask + sample * row + at, count) : squared_error(o, t, count);
    }
  }
  return float(sum * double(args.weight[sample]));
}

template <class Output, class Target>
void sample_gradient(const WeightedMse& args, int64_t sample) {
  const Output* output = static_cast<const Output*>(args.output) + sample * args.output_stride;
  const Target* target = static_cast<const Target*>(args.target) + sample * args.numel;
  Output* grad = static_cast<Output*>(args.output_grad) + sample * args.output_stride;
  const float factor = 2.0f * args.weight[sample] * args.loss_grad[sample];
  const bool* mask = args.mask ? args.mask + sample * args.spatial : nullptr;
  const int64_t row = mask ? args.spatial : args.numel;
  for (int64_t start = 0; start < args.numel; start += row) {
    MEGADIFF_SIMD
    for (int64_t i = 0; i < row; ++i) {
      const float value = factor * (load(output[start + i]) - load(target[start + i]));
      store(grad + start + i, mask && !mask[i] ? 0.0f : value);
    }
  }
  for (int64_t i = args.numel; i < args.output_stride; ++i) store(grad + i, 0.0f);
}

}  // namespace

void weighted_mse_forward(const WeightedMse& args) {
  with_types(args.output_dtype, args.target_dtype, [&](auto output, auto target) {
    parallel_for(args.batch, 1, [&](int64_t begin, int64_t end) {
      for (int64_t sample = begin; sample < end; ++sample)
        args.loss[sample] = sample_loss<typename decltype(output)::type, typename decltype(target)::type>(args, sample);
    });
  });
}

void weighted_mse_backward(const WeightedMse& args) {
  with_types(args.output_dtype, args.target_dtype, [&](auto output, auto target) {
    parallel_for(args.batch, 1, [&](int64_t begin, int64_t end) {
      for (int64_t sample = begin; sample < end; ++sample)
        sample_gradient<typename decltype(output)::type, typename decltype(target)::type>(args, sample);
    });
  });
}

}  // namespace megadiff::cpu::MEGADIFF_ISA
