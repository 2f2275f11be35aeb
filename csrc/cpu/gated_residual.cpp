// Gated residual on the CPU.
#include "common/gated_residual.h"

#include "common/parallel.h"
#include "cpu/element_types.h"

namespace megadiff::cpu::MEGADIFF_ISA {
namespace {

// As in ada_layer_norm.cpp: short float32 sums join the total, against rounding.
constexpr int64_t kRowsPerPartial = 32;

template <class T, class P>
void forward_row(const GatedResidual& args, int64_t row) {
  const int64_t width = args.width;
  const T* x = static_cast<const T*>(args.x) + row * width;
  const T* y = static_cast<const T*>(args.y) + row * width;
  const P* gate = static_cast<const P*>(args.gate) + row / args.tokens * args.gate_stride;
  T* out = static_cast<T*>(args.out) + row * width;
  MEGADIFF_SIMD
  for (int64_t d = 0; d < width; ++d) store(out + d, load(x[d]) + load(gate[d]) * load(y[d]));
}

template <class T, class P>
void backward_sample(const GatedResidual& args, int64_t sample) {
  const int64_t width = args.width;
  const P* gate = static_cast<const P*>(args.gate) + sample * args.gate_stride;
  float* gate_grad = args.gate_grad + sample * width;
  float* partial = args.workspace + sample * width;
  for (int64_t d = 0; d < width; ++d) gate_grad[d] = 0.0f;
  for (int64_t start = 0; start < args.tokens; start += kRowsPerPartial) {
    for (int64_t d = 0; d < width; ++d) partial[d] = 0.0f;
    const int64_t stop = start + kRowsPerPartial < args.tokens ? start + kRowsPerPartial : args.tokens;
    for (int64_t token = start; token < stop; ++token) {
      const int64_t at = (sample * args.tokens + token) * width;
      const T* y = static_cast<const T*>(args.y) + at;
      const T* grad = static_cast<const T*>(args.out_grad) + at;
      T* y_grad = static_cast<T*>(args.y_grad) + at;
      MEGADIFF_SIMD
      for (int64_t d = 0; d < width; ++d) {
        const float g = load(grad[d]);
        partial[d] += g * load(y[d]);
        store(y_grad + d, g * load(gate[d]));
      }
    }
    for (int64_t d = 0; d < width; ++d) gate_grad[d] += partial[d];
  }
}

}  // namespace

void gated_residual_forward(const GatedResidual& args) {
  with_types(args.dtype, args.param_dtype, [&](auto type, auto param_type) {
    parallel_for(args.batch * args.tokens, 1 + kGrainElements / args.width, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        forward_row<typename decltype(type)::type, typename decltype(param_type)::type>(args, row);
    });
  });
}

void gated_residual_backward(const GatedResidual& args) {
  with_types(args.dtype, args.param_dtype, [&](auto type, auto param_type) {
    parallel_for(args.batch, 1, [&](int64_t begin, int64_t end) {
      for (int64_t sample = begin; sample < end; ++sample)
        backward_sample<typename decltype(type)::type, typename decltype(param_type)::type>(args, sample);
    });
  });
}

}  // namespace megadiff::cpu::MEGADIFF_ISA
