// What every kernel shares: element types and the handles that bindings pass in. Knows nothing of torch.
#pragma once

#include <cstdint>

namespace megadiff {

enum class Dtype : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// The CUDA stream to launch on; null on the CPU.
using Stream = void*;

// Why the last launches failed, or null: a launch that CUDA refuses leaves its outputs unwritten.
namespace cpu {
inline const char* launch_error() { return nullptr; }
}  // namespace cpu
namespace cuda {
const char* launch_error();
}  // namespace cuda

}  // namespace megadiff
