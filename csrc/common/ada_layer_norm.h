// Adaptive LayerNorm: y = (x - mean) rstd (1 + scale) + shift over the last dim, scale and shift a sample; all gradients.
#pragma once

#include "common/types.h"

namespace megadiff {

struct AdaLayerNorm {
  const void* x;      // (B, N, D) contiguous
  const void* shift;  // (B, D), rows of shift_stride elements
  const void* scale;  // (B, D), rows of scale_stride elements
  void* y;            // (B, N, D), forward only
  float* mean;        // (B, N): written by forward, read by backward
  float* rstd;        // (B, N)
  const void* y_grad;  // (B, N, D) contiguous, backward only, as everything below
  void* x_grad;        // (B, N, D)
  float* shift_grad;   // (B, D)
  float* scale_grad;   // (B, D)
  float* workspace;    // ada_layer_norm_workspace() floats
  int64_t batch, tokens, width, shift_stride, scale_stride;
  float eps;
  Dtype dtype;
  Dtype param_dtype;  // of shift and scale: dtype or float32
};

namespace cpu {
int64_t ada_layer_norm_workspace(const AdaLayerNorm& args);
void ada_layer_norm_forward(const AdaLayerNorm& args, Stream stream);
void ada_layer_norm_backward(const AdaLayerNorm& args, Stream stream);
}  // namespace cpu

namespace cuda {
int64_t ada_layer_norm_workspace(const AdaLayerNorm& args);
void ada_layer_norm_forward(const AdaLayerNorm& args, Stream stream);
void ada_layer_norm_backward(const AdaLayerNorm& args, Stream stream);
}  // namespace cuda

}  // namespace megadiff
