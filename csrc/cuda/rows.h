// Pieces of kernels that treat (B, N, D) row by row: reading a row in vectors, and sums over the N rows of a sample.
#pragma once

#include <initializer_list>
#include <type_traits>

#include "cuda/element_types.h"

namespace megadiff::cuda {

constexpr int kRowThreads = 256;
constexpr int kRowWarps = kRowThreads / kWarpSize;
// Rows of one sample that one block sums; more blocks where a sample has more.
constexpr int kRowsPerBlock = 16;
// Most blocks along y; kernels with a sample a y walk on in steps of gridDim.y.
constexpr int64_t kMaxGridRows = 65535;

// 16 bytes at a time where every row starts at a multiple of 16 bytes, else one element.
template <class T>
bool can_take_packs(int64_t width, std::initializer_list<const void*> pointers) {
  uintptr_t bits = uintptr_t(width) * sizeof(T);
  for (const void* pointer : pointers) bits |= reinterpret_cast<uintptr_t>(pointer);
  return bits % 16 == 0;
}

// Calls f(Type<T>{}, Type<P>{}, std::integral_constant<int, kPack>{}) with the widest packs that rows and pointers allow.
template <class F>
void with_row_packs(
    Dtype dtype, Dtype param_dtype, int64_t width, std::initializer_list<const void*> pointers, const F& f) {
  with_types(dtype, param_dtype, [&](auto type, auto param_type) {
    using T = typename decltype(type)::type;
    if (can_take_packs<T>(width, pointers))
      f(type, param_type, std::integral_constant<int, 16 / sizeof(T)>{});
    else
      f(type, param_type, std::integral_constant<int, 1>{});
  });
}

template <class T, int kCount>
__device__ __forceinline__ Pack<T, kCount> read_pack(const T* from) {
  return *reinterpret_cast<const Pack<T, kCount>*>(from);
}

template <class T, int kCount>
__device__ __forceinline__ void write_pack(T* to, const Pack<T, kCount>& pack) {
  *reinterpret_cast<Pack<T, kCount>*>(to) = pack;
}

// The sum over all threads of the block, in every thread; `scratch` has kRowWarps floats and is free again afterwards.
__device__ __forceinline__ float block_sum(float value, float* scratch) {
  value = warp_sum(value);
  if (threadIdx.x % kWarpSize == 0) scratch[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  float total = 0.0f;
  for (int warp = 0; warp < kRowWarps; ++warp) total += scratch[warp];
  __syncthreads();
  return total;
}

// out[b, d] = sum over splits of partial[b, split, d], in the order of the splits. One thread an output.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) sum_splits_kernel(
    const float* partial, float* out, int64_t count, int64_t width, int64_t splits) {
  const int64_t at = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= count) return;
  const float* first = partial + at / width * splits * width + at % width;
  float sum = 0.0f;
  for (int64_t split = 0; split < splits; ++split) sum += first[split * width];
  out[at] = sum;
}

inline void sum_splits(const float* partial, float* out, int64_t batch, int64_t width, int64_t splits, Stream stream) {
  const int64_t count = batch * width;
  MD_LAUNCH(sum_splits_kernel<kRowThreads>, unsigned(ceil_divide(count, kRowThreads)), kRowThreads, 0, stream, partial, out, count,
            width, splits);
}

}  // namespace megadiff::cuda
