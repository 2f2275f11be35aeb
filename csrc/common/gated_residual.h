// out = x + gate y with a gate a sample and feature, and the gradients of y and gate (that of x is out's).
#pragma once

#include "common/types.h"

namespace megadiff {

struct GatedResidual {
  const void* x;         // (B, N, D) contiguous, forward only
  const void* y;         // (B, N, D) contiguous
  const void* gate;      // (B, D), rows of gate_stride elements
  void* out;             // (B, N, D), forward only
  const void* out_grad;  // (B, N, D) contiguous, backward only, as everything below
  void* y_grad;          // (B, N, D)
  float* gate_grad;      // (B, D)
  float* workspace;      // gated_residual_workspace() floats
  int64_t batch, tokens, width, gate_stride;
  Dtype dtype;
  Dtype param_dtype;  // of gate: dtype or float32
};

namespace cpu {
int64_t gated_residual_workspace(const GatedResidual& args);
void gated_residual_forward(const GatedResidual& args, Stream stream);
void gated_residual_backward(const GatedResidual& args, Stream stream);
}  // namespace cpu

namespace cuda {
int64_t gated_residual_workspace(const GatedResidual& args);
void gated_residual_forward(const GatedResidual& args, Stream stream);
void gated_residual_backward(const GatedResidual& args, Stream stream);
}  // namespace cuda

}  // namespace megadiff
