// Guidance and a sampler's update on CUDA; 16 bytes of the state a thread where rows are aligned.
#include "common/solver_step.h"

#include "cuda/rows.h"

namespace megadiff::cuda {
namespace {

constexpr int kThreads = 256;

template <class Output, class T, int kPack>
__global__ void __launch_bounds__(kThreads) solver_step_kernel(SolverStep args) {
  const int64_t column = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * kPack;
  if (column >= args.numel) return;
  const float* c = args.corrector_weights;
  const float* n = args.next_weights;
  for (int64_t sample = blockIdx.y; sample < args.batch; sample += gridDim.y) {
    const int64_t at = sample * args.numel + column;
    const auto read = [at](const void* from) {
      return from ? read_pack<T, kPack>(static_cast<const T*>(from) + at) : Pack<T, kPack>{};
    };
    const auto write = [at](void* to, const Pack<T, kPack>& values) {
      if (to) write_pack<T, kPack>(static_cast<T*>(to) + at, values);
    };
    const Output* output = static_cast<const Output*>(args.output) + sample * args.output_stride + column;
    const auto conditional = read_pack<Output, kPack>(output);
    auto null = conditional;
    if (args.guided) null = read_pack<Output, kPack>(output + args.batch * args.output_stride);
    const auto xs = read(args.x), h1s = read(args.h1), h2s = read(args.h2), noises = read(args.noise);
    const auto lasts = read(args.x_last);
    Pack<T, kPack> next, ms, bases;
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      float guided = load(conditional.at[i]);
      if (args.guided) guided = load(null.at[i]) + args.guidance * (guided - load(null.at[i]));
      float m = args.x_to_m * load(xs.at[i]) + args.output_to_m * guided;
      if (args.clip > 0.0f) {  // written so that a NaN stays one
        m = m > args.clip ? args.clip : m;
        m = m < -args.clip ? -args.clip : m;
      }
      const float h1 = load(h1s.at[i]), h2 = load(h2s.at[i]);
      float base = load(xs.at[i]);
      if (args.corrector) base = c[0] * load(lasts.at[i]) + c[1] * h1 + c[2] * h2 + c[3] * m;
      store(&ms.at[i], m);
      store(&bases.at[i], base);
      store(&next.at[i], n[0] * base + n[1] * m + n[2] * h1 + n[3] * h2 + n[4] * load(noises.at[i]));
    }
    write(args.next, next);
    write(args.m, ms);
    if (args.corrector) write(args.base, bases);
  }
}

template <class Output, class T, int kPack>
void launch(const SolverStep& args, Stream stream) {
  const unsigned columns = unsigned(ceil_divide(args.numel, kThreads * kPack));
  const dim3 grid(columns, unsigned(args.batch < kMaxGridRows ? args.batch : kMaxGridRows));
  MD_LAUNCH((solver_step_kernel<Output, T, kPack>), grid, kThreads, 0, stream, args);
}

}  // namespace

void solver_step(const SolverStep& args, Stream stream) {
  with_types(args.output_dtype, args.dtype, [&](auto output_type, auto type) {
    using Output = typename decltype(output_type)::type;
    using T = typename decltype(type)::type;
    const bool state = can_take_packs<T>(
        args.numel, {args.x, args.x_last, args.h1, args.h2, args.noise, args.next, args.m, args.base});
    if (state && can_take_packs<Output>(args.output_stride, {args.output}))
      launch<Output, T, 16 / sizeof(T)>(args, stream);
    else
      launch<Output, T, 1>(args, stream);
  });
}

}  // namespace megadiff::cuda
