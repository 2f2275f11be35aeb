// Guidance and a sampler's update on the CPU.
#include "common/solver_step.h"

#include "common/parallel.h"
#include "cpu/element_types.h"

namespace megadiff::cpu::MEGADIFF_ISA {
namespace {

constexpr int64_t kPart = 4096;  // elements of a sample that one thread takes at a time

template <class T>
MEGADIFF_INLINE const T* place(const void* tensor, int64_t at) {
  return static_cast<const T*>(tensor) + at;
}

template <class T>
MEGADIFF_INLINE T* place(void* tensor, int64_t at) {
  return static_cast<T*>(tensor) + at;
}

// The update of a vector of elements: `at` in the state, `output_at` in the network's answer.
template <class Output, class T, class Lanes>
MEGADIFF_INLINE void step(const SolverStep& args, int64_t at, int64_t output_at, int64_t null_at, Lanes lanes) {
  Vec guided = lanes.load(place<Output>(args.output, output_at));
  if (args.guided) {
    const Vec null = lanes.load(place<Output>(args.output, null_at));
    guided = null + args.guidance * (guided - null);
  }
  const Vec x = lanes.load(place<T>(args.x, at));
  Vec m = args.x_to_m * x + args.output_to_m * guided;
  if (args.clip > 0.0f) {
    m = m > args.clip ? splat(args.clip) : m;
    m = m < -args.clip ? splat(-args.clip) : m;
  }
  Vec base = x;
  const Vec h1 = args.h1 ? lanes.load(place<T>(args.h1, at)) : Vec{};
  const Vec h2 = args.h2 ? lanes.load(place<T>(args.h2, at)) : Vec{};
  if (args.corrector) {
    const float* c = args.corrector_weights;
    base = c[0] * lanes.load(place<T>(args.x_last, at)) + c[1] * h1 + c[2] * h2 + c[3] * m;
    lanes.store(place<T>(args.base, at), base);
  }
  const float* n = args.next_weights;
  Vec next = n[0] * base + n[1] * m;
  if (args.h1) next += n[2] * h1;
  if (args.h2) next += n[3] * h2;
  if (args.noise) next += n[4] * lanes.load(place<T>(args.noise, at));
  if (args.m) lanes.store(place<T>(args.m, at), m);
  lanes.store(place<T>(args.next, at), next);
}

// Takes the arguments by value: stores could change them otherwise, for all that the compiler knows.
template <class Output, class T>
void step_part(const SolverStep args, int64_t sample, int64_t start, int64_t stop) {
  const int64_t row = sample * args.numel, output_row = sample * args.output_stride;
  const int64_t null_row = output_row + args.batch * args.output_stride;
  for_vectors(stop - start, [&](int64_t i, auto lanes) MEGADIFF_INLINE_LAMBDA {
    step<Output, T>(args, row + start + i, output_row + start + i, null_row + start + i, lanes);
  });
}

}  // namespace

void solver_step(const SolverStep& args) {
  const int64_t parts = (args.numel + kPart - 1) / kPart;
  const int64_t grain = 1 + kGrainElements / (args.numel < kPart ? args.numel : kPart);
  with_types(args.output_dtype, args.dtype, [&](auto output_type, auto type) {
    parallel_for(args.batch * parts, grain, [&](int64_t begin, int64_t end) {
      for (int64_t index = begin; index < end; ++index) {
        const int64_t start = index % parts * kPart;
        const int64_t stop = start + kPart < args.numel ? start + kPart : args.numel;
        using Output = typename decltype(output_type)::type;
        step_part<Output, typename decltype(type)::type>(args, index / parts, start, stop);
      }
    });
  });
}

}  // namespace megadiff::cpu::MEGADIFF_ISA
