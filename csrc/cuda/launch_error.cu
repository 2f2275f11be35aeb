// Asks CUDA whether the launches so far were accepted.
#include "cuda/primitives.h"

namespace megadiff::cuda {

const char* launch_error() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace megadiff::cuda
