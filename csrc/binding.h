// What the bindings of all operators share: checks with one form of message, allocation, the device's kernels and stream.
// Only torch's stable ABI (torch/csrc/stable, torch/headeronly) is used, so one build serves every torch from 2.10 on.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "common/types.h"

// The build says whose kernels are bound (cpu or cuda), under which dispatch key, in which namespace of torch.ops. Tests
// bind the CUDA kernels a second time, as they run on the host.
#if !defined(MEGADIFF_DEVICE) || !defined(MEGADIFF_KEY) || !defined(MEGADIFF_LIBRARY)
#error "define MEGADIFF_DEVICE, MEGADIFF_KEY and MEGADIFF_LIBRARY"
#endif

#define MEGADIFF_IMPL(library, key, m) STABLE_TORCH_LIBRARY_IMPL(library, key, m)
#define MEGADIFF_DEFINE(library, m) STABLE_TORCH_LIBRARY(library, m)

namespace megadiff {

namespace cpu {}
namespace cuda {}
namespace device = MEGADIFF_DEVICE;

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// An operator's name and the checks of its arguments: "megadiff::NAME: ARGUMENT: expected WHAT, got WHAT".
class Arguments {
 public:
  explicit Arguments(const char* op) : op_(op) {}

  void require(bool holds, const char* argument, const std::string& expected, const std::string& got) const;
  void require_shape(const char* argument, const Tensor& tensor, const std::vector<int64_t>& shape) const;
  void require_dtype(const char* argument, const Tensor& tensor, std::initializer_list<ScalarType> allowed) const;
  void require_contiguous(const char* argument, const Tensor& tensor) const;
  // On the device (and its index) of `first`.
  void require_same_device(const char* argument, const Tensor& tensor, const Tensor& first) const;
  // All of the above for a tensor whose shape and dtype are known.
  void require_dense(
      const char* argument, const Tensor& tensor, const std::vector<int64_t>& shape, ScalarType type,
      const Tensor& first) const;
  // To call after the kernels: raises if one was refused by the device.
  void check_launch() const;
  // A floating type that has kernels.
  Dtype dtype(const char* argument, const Tensor& tensor) const;

 private:
  const char* op_;
};

std::string to_text(ScalarType type);
std::string to_text(const std::vector<int64_t>& shape);
std::vector<int64_t> shape_of(const Tensor& tensor);

// `rows` x `columns` elements whose rows lie at any distance but whose columns are adjacent.
bool has_adjacent_columns(const Tensor& tensor);

Tensor new_empty(const Tensor& like, const std::vector<int64_t>& shape, ScalarType type);

inline Tensor new_floats(const Tensor& like, const std::vector<int64_t>& shape) {
  return new_empty(like, shape, ScalarType::Float);
}

template <class T>
const T* read(const Tensor& tensor) {
  return static_cast<const T*>(tensor.data_ptr());
}

template <class T>
const T* read(const OptionalTensor& tensor) {
  return tensor ? static_cast<const T*>(tensor->data_ptr()) : nullptr;
}

template <class T>
T* write(const Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

template <class T>
T* write(const OptionalTensor& tensor) {
  return tensor ? static_cast<T*>(tensor->data_ptr()) : nullptr;
}

// The current stream of a tensor's device; null on the CPU.
Stream current_stream(const Tensor& tensor);

// Makes the device of a tensor the current one for the lifetime of this object.
class OnDevice {
 public:
  explicit OnDevice(const Tensor& tensor) {
    if (!tensor.is_cpu()) guard_.emplace(tensor.get_device_index());
  }

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};

}  // namespace megadiff
