// What every kernel shares: element types and the handles that bindings pass in. Knows nothing of torch.
#pragma once

#include <cstdint>

namespace megadiff {

enum class Dtype : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// The CUDA stream to launch on; null on the CPU.
using Stream = void*;

}  // namespace megadiff
