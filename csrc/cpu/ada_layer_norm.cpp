// Adaptive LayerNorm on the CPU, a row of D features at a time.
#include "common/ada_layer_norm.h"

#include "common/parallel.h"
#include "cpu/element_types.h"

namespace megadiff::cpu::MEGADIFF_ISA {
namespace {

// Rows whose column sums are kept in one float32 accumulator before they join the total, against rounding.
constexpr int64_t kRowsPerPartial = 32;

// Mean first, then the sum of squared differences from it: the row is in the L1 cache, so the second pass is cheap and
// nothing cancels.
template <class T>
MEGADIFF_INLINE void row_statistics(const T* x, int64_t width, float eps, float* mean, float* rstd) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t d = 0; d < width; ++d) sum += load(x[d]);
  const float center = sum / float(width);
  float squares = 0.0f, rest = 0.0f;
#pragma omp simd reduction(+ : squares, rest)
  for (int64_t d = 0; d < width; ++d) {
    const float difference = load(x[d]) - center;
    squares += difference * difference;
    rest += difference;
  }
  // `rest` is what rounding left of the mean.
  const float correction = rest / float(width);
  *mean = center + correction;
  *rstd = 1.0f / std::sqrt(squares / float(width) - correction * correction + eps);
}

template <class T, class P>
void forward_row(const AdaLayerNorm& args, int64_t row) {
  const int64_t sample = row / args.tokens, width = args.width;
  const T* x = static_cast<const T*>(args.x) + row * width;
  const P* shift = static_cast<const P*>(args.shift) + sample * args.shift_stride;
  const P* scale = static_cast<const P*>(args.scale) + sample * args.scale_stride;
  T* y = static_cast<T*>(args.y) + row * width;
  float mean, rstd;
  row_statistics(x, width, args.eps, &mean, &rstd);
  MEGADIFF_SIMD
  for (int64_t d = 0; d < width; ++d)
    store(y + d, (load(x[d]) - mean) * rstd * (1.0f + load(scale[d])) + load(shift[d]));
  args.mean[row] = mean;
  args.rstd[row] = rstd;
}

// x_grad = rstd (h - mean(h) - xhat mean(h xhat)) with h = y_grad (1 + scale); adds to the two column sums.
template <class T, class P>
MEGADIFF_INLINE void backward_row(
    const AdaLayerNorm& args, int64_t row, const P* scale, float* shift_sum, float* scale_sum) {
  const int64_t width = args.width;
  const T* x = static_cast<const T*>(args.x) + row * width;
  const T* grad = static_cast<const T*>(args.y_grad) + row * width;
  T* x_grad = static_cast<T*>(args.x_grad) + row * width;
  const float mean = args.mean[row], rstd = args.rstd[row];
  float sum = 0.0f, product = 0.0f;
#pragma omp simd reduction(+ : sum, product)
  for (int64_t d = 0; d < width; ++d) {
    const float g = load(grad[d]), normed = (load(x[d]) - mean) * rstd;
    const float h = g * (1.0f + load(scale[d]));
    sum += h;
    product += h * normed;
    shift_sum[d] += g;
    scale_sum[d] += g * normed;
  }
  const float mean_h = sum / float(width), mean_product = product / float(width);
  MEGADIFF_SIMD
  for (int64_t d = 0; d < width; ++d) {
    const float normed = (load(x[d]) - mean) * rstd;
    store(x_grad + d, rstd * (load(grad[d]) * (1.0f + load(scale[d])) - mean_h - normed * mean_product));
  }
}

template <class T, class P>
void backward_sample(const AdaLayerNorm& args, int64_t sample) {
  const int64_t width = args.width;
  const P* scale = static_cast<const P*>(args.scale) + sample * args.scale_stride;
  float* shift_grad = args.shift_grad + sample * width;
  float* scale_grad = args.scale_grad + sample * width;
  float* partial = args.workspace + sample * 2 * width;
  for (int64_t d = 0; d < width; ++d) shift_grad[d] = scale_grad[d] = 0.0f;
  for (int64_t start = 0; start < args.tokens; start += kRowsPerPartial) {
    for (int64_t d = 0; d < 2 * width; ++d) partial[d] = 0.0f;
    const int64_t stop = start + kRowsPerPartial < args.tokens ? start + kRowsPerPartial : args.tokens;
    for (int64_t token = start; token < stop; ++token)
      backward_row<T>(args, sample * args.tokens + token, scale, partial, partial + width);
    for (int64_t d = 0; d < width; ++d) shift_grad[d] += partial[d];
    for (int64_t d = 0; d < width; ++d) scale_grad[d] += partial[width + d];
  }
}

}  // namespace

void ada_layer_norm_forward(const AdaLayerNorm& args) {
  with_types(args.dtype, args.param_dtype, [&](auto type, auto param_type) {
    parallel_for(args.batch * args.tokens, 1 + kGrainElements / args.width, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        forward_row<typename decltype(type)::type, typename decltype(param_type)::type>(args, row);
    });
  });
}

void ada_layer_norm_backward(const AdaLayerNorm& args) {
  with_types(args.dtype, args.param_dtype, [&](auto type, auto param_type) {
    parallel_for(args.batch, 1, [&](int64_t begin, int64_t end) {
      for (int64_t sample = begin; sample < end; ++sample)
        backward_sample<typename decltype(type)::type, typename decltype(param_type)::type>(args, sample);
    });
  });
}

}  // namespace megadiff::cpu::MEGADIFF_ISA
