// Guidance and a sampler's update on CUDA, one thread an element.
#include "common/solver_step.h"

#include "cuda/element_types.h"

namespace megadiff::cuda {
namespace {

constexpr int kThreads = 256;

template <class Output, class T>
__global__ void __launch_bounds__(kThreads) solver_step_kernel(SolverStep args) {
  const int64_t at = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= args.batch * args.numel) return;
  const auto read = [at](const void* from) { return from ? load(static_cast<const T*>(from)[at]) : 0.0f; };
  const Output* output = static_cast<const Output*>(args.output) + at / args.numel * args.output_stride + at % args.numel;
  float guided = load(*output);
  if (args.guided) {
    const float null = load(output[args.batch * args.output_stride]);
    guided = null + args.guidance * (guided - null);
  }
  const float x = read(args.x), h1 = read(args.h1), h2 = read(args.h2);
  float m = args.x_to_m * x + args.output_to_m * guided;
  if (args.clip > 0.0f) {  // written so that a NaN stays one
    m = m > args.clip ? args.clip : m;
    m = m < -args.clip ? -args.clip : m;
  }
  float base = x;
  if (args.corrector) {
    const float* c = args.corrector_weights;
    base = c[0] * read(args.x_last) + c[1] * h1 + c[2] * h2 + c[3] * m;
    store(static_cast<T*>(args.base) + at, base);
  }
  const float* n = args.next_weights;
  store(static_cast<T*>(args.m) + at, m);
  store(static_cast<T*>(args.next) + at, n[0] * base + n[1] * m + n[2] * h1 + n[3] * h2 + n[4] * read(args.noise));
}

}  // namespace

void solver_step(const SolverStep& args, Stream stream) {
  with_types(args.output_dtype, args.dtype, [&](auto output_type, auto type) {
    MD_LAUNCH((solver_step_kernel<typename decltype(output_type)::type, typename decltype(type)::type>),
              unsigned(ceil_divide(args.batch * args.numel, kThreads)), kThreads, 0, stream, args);
  });
}

}  // namespace megadiff::cuda
