// Noise, noisy sample and training target in one pass: x_t = alpha x0 + sigma n, target = a n + b x0.
#pragma once

#include "common/types.h"

namespace megadiff {

// a and b choose the target: eps (1, 0), x0 (0, 1), v (alpha, -sigma), flow (1, -1).
struct Diffuse {
  const void* x0;             // (B, numel) contiguous
  const void* noise;          // (B, numel) contiguous in x0's dtype, or null: Philox normals
  const float* coefficients;  // (B, 4): alpha, sigma, a, b
  const int64_t* sample_ids;  // (B), for Philox only
  void* x_t;                  // (B, numel) in x0's dtype
  void* target;               // (B, numel) in x0's dtype
  int64_t batch, numel;
  uint64_t seed;  // with step, sample id and purpose it fixes the numbers: megadiff/ops/philox.py
  uint32_t step, purpose;
  Dtype dtype;
};

// The 32-bit words themselves, for tests: (B, numel) int64 in [0, 2^32).
struct PhiloxBits {
  const int64_t* sample_ids;
  int64_t* words;
  int64_t batch, numel;
  uint64_t seed;
  uint32_t step, purpose;
};

namespace cpu {
void diffuse(const Diffuse& args, Stream stream);
void philox_bits(const PhiloxBits& args, Stream stream);
}  // namespace cpu

namespace cuda {
void diffuse(const Diffuse& args, Stream stream);
void philox_bits(const PhiloxBits& args, Stream stream);
}  // namespace cuda

}  // namespace megadiff
