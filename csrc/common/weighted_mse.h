// loss[b] = weight[b] * sum_i mask[b, i] (output[b, i] - target[b, i])^2 and its gradient for `output`.
#pragma once

#include "common/types.h"

namespace megadiff {

struct WeightedMse {
  const void* output;      // (B, >= numel), rows of output_stride elements; only the first numel of a row are used
  const void* target;      // (B, numel), contiguous
  const float* weight;     // (B)
  const bool* mask;        // (B, spatial) or null; a row repeats for each of the numel / spatial channels
  const float* loss_grad;  // (B), backward only
  float* loss;             // (B), forward only
  void* output_grad;       // (B, output_stride) contiguous, backward only; zero beyond numel
  float* workspace;        // weighted_mse_workspace() floats, forward only
  int64_t batch, numel, spatial, output_stride;
  Dtype output_dtype;
  Dtype target_dtype;  // output_dtype or float32
};

namespace cpu {
int64_t weighted_mse_workspace(const WeightedMse& args);
void weighted_mse_forward(const WeightedMse& args, Stream stream);
void weighted_mse_backward(const WeightedMse& args, Stream stream);
}  // namespace cpu

namespace cuda {
int64_t weighted_mse_workspace(const WeightedMse& args);
void weighted_mse_forward(const WeightedMse& args, Stream stream);
void weighted_mse_backward(const WeightedMse& args, Stream stream);
}  // namespace cuda

}  // namespace megadiff
