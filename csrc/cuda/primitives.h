// The few CUDA constructs that the kernels here are written against. nvcc sees the real ones; g++ takes them from
// tests/hostcuda/hostcuda.h, which runs a kernel's own source on the host.
#pragma once

#ifdef __CUDACC__

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

// Launches `kernel` (in parentheses if its name holds a comma).
#define MD_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  kernel<<<(grid), (block), (shared_bytes), static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__)
// An array of constant length in shared memory.
#define MD_SHARED(Type, name, count) __shared__ Type name[count]
// The dynamic shared memory of the launch as Type*; one a kernel.
#define MD_DYNAMIC_SHARED(Type, name) \
  extern __shared__ __align__(16) unsigned char md_dynamic_shared[]; \
  Type* const name = reinterpret_cast<Type*>(md_dynamic_shared)
// Lets `kernel` take more than 48 KiB of dynamic shared memory.
#define MD_ALLOW_SHARED(kernel, bytes) \
  cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes))

#else

#include "hostcuda.h"

#endif

#include "common/types.h"

namespace megadiff::cuda {

constexpr int kWarpSize = 32;
constexpr unsigned kFullMask = 0xffffffffu;

using BFloat16 = __nv_bfloat16;
using Float16 = __half;

__device__ __forceinline__ float load(float value) { return value; }
__device__ __forceinline__ float load(BFloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ float load(Float16 value) { return __half2float(value); }

__device__ __forceinline__ void store(float* to, float value) { *to = value; }
__device__ __forceinline__ void store(BFloat16* to, float value) { *to = __float2bfloat16_rn(value); }
__device__ __forceinline__ void store(Float16* to, float value) { *to = __float2half_rn(value); }

// kCount elements that are read and written as one, aligned accordingly.
template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Pack {
  T at[kCount];
};

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kFullMask, value, offset);
  return value;
}

}  // namespace megadiff::cuda
