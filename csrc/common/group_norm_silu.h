// GroupNorm, an optional scale and shift a sample and channel, an optional SiLU, and all gradients.
#pragma once

#include "common/types.h"

namespace megadiff {

// u = ((x + offset) - mean) * rstd * weight + bias;  z = u * (1 + scale) + shift;  y = silu ? z * sigmoid(z) : z.
// Mean and rstd are those of x + offset over the channels of a group and all positions.
struct GroupNormSilu {
  const void* x;       // (N, C, spatial), or (N, spatial, C) where channels_last
  const void* weight;  // (C) or null for 1
  const void* bias;    // (C) or null for 0
  const void* offset;  // (N, C), rows of offset_stride elements, or null for 0
  const void* scale;   // (N, C), rows of scale_stride, or null for 0
  const void* shift;   // (N, C), rows of shift_stride, or null for 0
  void* y;             // like x, forward only
  float* mean;         // (N, G): written by forward, read by backward; the mean of x + offset
  float* rstd;         // (N, G)
  const void* y_grad;  // like x, backward only, as everything below
  void* x_grad;        // like x
  float* weight_grad;  // (C) or null where not wanted, as the next four
  float* bias_grad;    // (C)
  float* offset_grad;  // (N, C) contiguous
  float* scale_grad;   // (N, C) contiguous
  float* shift_grad;   // (N, C) contiguous
  float* workspace;    // group_norm_silu_{forward,backward}_workspace() floats
  int64_t batch, channels, groups, spatial;
  int64_t offset_stride, scale_stride, shift_stride;
  float eps;
  bool silu, channels_last;
  Dtype dtype;        // of x, y and their gradients
  Dtype param_dtype;  // of weight, bias, offset, scale and shift: dtype or float32
};

namespace cpu {
int64_t group_norm_silu_forward_workspace(const GroupNormSilu& args);
int64_t group_norm_silu_backward_workspace(const GroupNormSilu& args);
void group_norm_silu_forward(const GroupNormSilu& args, Stream stream);
void group_norm_silu_backward(const GroupNormSilu& args, Stream stream);
}  // namespace cpu

namespace cuda {
int64_t group_norm_silu_forward_workspace(const GroupNormSilu& args);
int64_t group_norm_silu_backward_workspace(const GroupNormSilu& args);
void group_norm_silu_forward(const GroupNormSilu& args, Stream stream);
void group_norm_silu_backward(const GroupNormSilu& args, Stream stream);
}  // namespace cuda

}  // namespace megadiff
