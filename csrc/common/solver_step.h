// Guidance and the update of a sampler in one pass. Every solver is a set of coefficients.
#pragma once

#include "common/types.h"

namespace megadiff {

// guided = null + guidance (conditional - null)          (or the output itself without a null half)
// m      = x_to_m x + output_to_m guided, clamped to [-clip, clip] where clip > 0
// base   = corrector ? c[0] x_last + c[1] h1 + c[2] h2 + c[3] m : x
// next   = n[0] base + n[1] m + n[2] h1 + n[3] h2 + n[4] noise
// m is the predicted x0, which solvers with a memory want back. DDIM and Euler use n[0], n[1] (and noise),
// DPM-Solver++(2M) h1 too, UniPC all of it.
struct SolverStep {
  const void* output;  // (B, >= numel), or (2B, >= numel): conditional half, then null half; rows of output_stride
  const void* x;       // (B, numel): what the network saw
  const void* x_last;  // (B, numel) or null where not used, as the next three
  const void* h1;      // the m of one step ago
  const void* h2;      // the m of two steps ago
  const void* noise;
  void* next;  // (B, numel)
  void* m;     // (B, numel) or null where not wanted
  void* base;  // (B, numel) or null without a corrector
  int64_t batch, numel, output_stride;
  float guidance;
  bool guided, corrector;
  float x_to_m, output_to_m, clip;
  float corrector_weights[4];
  float next_weights[5];
  Dtype dtype;         // of all but output
  Dtype output_dtype;  // dtype, or any where dtype is float32
};

namespace cpu {
void solver_step(const SolverStep& args, Stream stream);
}
namespace cuda {
void solver_step(const SolverStep& args, Stream stream);
}

}  // namespace megadiff
