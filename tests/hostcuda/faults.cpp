// One small kernel a fault, each chosen by the name on the command line, to test the header that runs CUDA on the host.
#include "cuda/primitives.h"

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

using namespace megadiff::cuda;

namespace {

constexpr int kThreads = 64;

// out[block] = sum of 64 numbers through shared memory; right unless a fault is planted.
enum class Fault { kNone, kMissingBarrier, kSharedOverrun, kBlockRace };

template <Fault kFault>
__global__ void sum_kernel(const float* in, float* out) {
  MD_SHARED(float, values, kThreads);
  const int t = threadIdx.x;
  const float own = in[blockIdx.x * kThreads + t];
  values[kFault == Fault::kSharedOverrun ? t + 1 : t] = own;
  if (kFault != Fault::kMissingBarrier) __syncthreads();
  if (t == 0) {
    float sum = 0.0f;
    for (int i = 0; i < kThreads; ++i) sum += values[i];
    out[kFault == Fault::kBlockRace ? 0 : blockIdx.x] = sum;
  }
}

__global__ void dynamic_kernel(float* out, int overrun) {
  MD_DYNAMIC_SHARED(float, values);
  values[threadIdx.x + overrun] = float(threadIdx.x);
  __syncthreads();
  out[threadIdx.x] = values[kThreads - 1 - threadIdx.x];
}

__global__ void global_kernel(float* out, int overrun) { out[threadIdx.x + overrun] = 1.0f; }

__global__ void divergent_kernel(float* out) {
  if (threadIdx.x < 40) __syncthreads();
  out[threadIdx.x] = 1.0f;
}

__global__ void two_barriers_kernel(float* out) {
  if (threadIdx.x < 32)
    __syncthreads();
  else
    __syncthreads();
  out[threadIdx.x] = 1.0f;
}

__global__ void stuck_kernel(float* out) {
  const float own = threadIdx.x < 8 ? __shfl_xor_sync(kFullMask, 1.0f, 1) : 0.0f;  // the other lanes never come
  out[threadIdx.x] = own;
}

__global__ void static_shared_kernel(float* out) {
  MD_SHARED(float, values, 13 * 1024);
  values[threadIdx.x] = 1.0f;
  out[threadIdx.x] = values[threadIdx.x];
}

__global__ void mask_kernel(float* out) { out[threadIdx.x] = __shfl_xor_sync(0x0000ffffu, 1.0f, 1); }

__global__ void broadcast_kernel(float* out) {
  const double wide = __shfl_sync(kFullMask, double(threadIdx.x), 3);
  out[threadIdx.x] = float(wide) + __shfl_up_sync(kFullMask, float(threadIdx.x % 32), 0);
}

int report(const std::vector<float>& out, int count) {
  if (const cudaError_t error = cudaGetLastError()) {
    std::printf("launch refused: %s\n", cudaGetErrorString(error));
    return 3;
  }
  for (int i = 0; i < count; ++i) std::printf("%g ", out[i]);
  std::printf("\n");
  return 0;
}

template <Fault kFault>
int run_sum() {
  const std::vector<float> in(4 * kThreads, 0.5f);
  std::vector<float> out(4);
  MD_LAUNCH(sum_kernel<kFault>, 4, kThreads, 0, nullptr, in.data(), out.data());
  return report(out, 4);
}

int run(const std::string& name) {
  // On the heap and of the exact size, so that the address sanitizer sees the first element beyond.
  std::vector<float> out(kThreads);
  const size_t bytes = kThreads * sizeof(float);
  if (name == "sum") return run_sum<Fault::kNone>();
  if (name == "missing_barrier") return run_sum<Fault::kMissingBarrier>();
  if (name == "shared_overrun") return run_sum<Fault::kSharedOverrun>();
  if (name == "block_race") return run_sum<Fault::kBlockRace>();
  if (name == "dynamic") MD_LAUNCH(dynamic_kernel, 1, kThreads, bytes, nullptr, out.data(), 0);
  if (name == "dynamic_overrun") MD_LAUNCH(dynamic_kernel, 1, kThreads, bytes, nullptr, out.data(), 1);
  if (name == "global_overrun") MD_LAUNCH(global_kernel, 1, kThreads, 0, nullptr, out.data(), 1);
  if (name == "divergent") MD_LAUNCH(divergent_kernel, 1, kThreads, 0, nullptr, out.data());
  if (name == "two_barriers") MD_LAUNCH(two_barriers_kernel, 1, kThreads, 0, nullptr, out.data());
  if (name == "stuck") MD_LAUNCH(stuck_kernel, 1, kThreads, 0, nullptr, out.data());
  if (name == "static_shared") MD_LAUNCH(static_shared_kernel, 1, kThreads, 0, nullptr, out.data());
  if (name == "mask") MD_LAUNCH(mask_kernel, 1, kThreads, 0, nullptr, out.data());
  if (name == "broadcast") MD_LAUNCH(broadcast_kernel, 1, kThreads, 0, nullptr, out.data());
  if (name == "too_much_shared") MD_LAUNCH(dynamic_kernel, 1, kThreads, 49 * 1024, nullptr, out.data(), 0);
  if (name == "allowed_shared") {
    MD_ALLOW_SHARED(dynamic_kernel, 100 * 1024);
    MD_LAUNCH(dynamic_kernel, 1, kThreads, 100 * 1024, nullptr, out.data(), 0);
  }
  if (name == "grid") MD_LAUNCH(global_kernel, dim3(1, 65536), kThreads, 0, nullptr, out.data(), 0);
  return report(out, 2);
}

}  // namespace

// Also called by name, from a shared library.
extern "C" int run_kernel(const char* name) { return run(name); }

int main(int, char** arguments) { return run(arguments[1]); }
