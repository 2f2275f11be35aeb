// The checks of binding.h, and how kernels reach torch's threads and streams.
#include "binding.h"

#include <dlfcn.h>

#include "common/parallel.h"

namespace megadiff {

std::string to_text(ScalarType type) {
  switch (type) {
    case ScalarType::Float: return "float32";
    case ScalarType::Double: return "float64";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Half: return "float16";
    case ScalarType::Long: return "int64";
    case ScalarType::Int: return "int32";
    case ScalarType::Bool: return "bool";
    default: return "dtype " + std::to_string(int(type));
  }
}

std::string to_text(const std::vector<int64_t>& shape) {
  std::string text = "(";
  for (size_t dim = 0; dim < shape.size(); ++dim) text += (dim ? ", " : "") + std::to_string(shape[dim]);
  return text + (shape.size() == 1 ? ",)" : ")");
}

std::vector<int64_t> shape_of(const Tensor& tensor) {
  std::vector<int64_t> shape(tensor.dim());
  for (size_t dim = 0; dim < shape.size(); ++dim) shape[dim] = tensor.size(int64_t(dim));
  return shape;
}

void Arguments::require(bool holds, const char* argument, const std::string& expected, const std::string& got) const {
  STD_TORCH_CHECK(holds, "megadiff::", op_, ": ", argument, ": expected ", expected, ", got ", got);
}

void Arguments::require_shape(const char* argument, const Tensor& tensor, const std::vector<int64_t>& shape) const {
  const std::vector<int64_t> got = shape_of(tensor);
  require(got == shape, argument, "shape " + to_text(shape), to_text(got));
}

void Arguments::require_dtype(
    const char* argument, const Tensor& tensor, std::initializer_list<ScalarType> allowed) const {
  std::string names;
  for (ScalarType type : allowed) {
    if (tensor.scalar_type() == type) return;
    names += (names.empty() ? "" : " or ") + to_text(type);
  }
  require(false, argument, names, to_text(tensor.scalar_type()));
}

void Arguments::require_contiguous(const char* argument, const Tensor& tensor) const {
  require(tensor.is_contiguous(), argument, "a contiguous tensor", "strides that skip or reorder elements");
}

void Arguments::require_same_device(const char* argument, const Tensor& tensor, const Tensor& first) const {
  const bool same = tensor.is_cpu() == first.is_cpu() && tensor.get_device_index() == first.get_device_index();
  require(same, argument, "the device of the first argument", "another device");
}

void Arguments::require_dense(
    const char* argument, const Tensor& tensor, const std::vector<int64_t>& shape, ScalarType type,
    const Tensor& first) const {
  require_dtype(argument, tensor, {type});
  require_shape(argument, tensor, shape);
  require_contiguous(argument, tensor);
  require_same_device(argument, tensor, first);
}

void Arguments::check_launch() const {
  const char* error = device::launch_error();
  STD_TORCH_CHECK(error == nullptr, "megadiff::", op_, ": the device refused the kernel: ", error ? error : "");
}

Dtype Arguments::dtype(const char* argument, const Tensor& tensor) const {
  require_dtype(argument, tensor, {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half});
  switch (tensor.scalar_type()) {
    case ScalarType::BFloat16: return Dtype::kBFloat16;
    case ScalarType::Half: return Dtype::kFloat16;
    default: return Dtype::kFloat32;
  }
}

bool has_adjacent_columns(const Tensor& tensor) {
  const int64_t last = tensor.dim() - 1;
  return tensor.size(last) <= 1 || tensor.stride(last) == 1;
}

Tensor new_empty(const Tensor& like, const std::vector<int64_t>& shape, ScalarType type) {
  return torch::stable::new_empty(like, {shape.data(), shape.size()}, type);
}

Stream current_stream(const Tensor& tensor) {
  if (tensor.is_cpu()) return nullptr;
  // Looked up at run time: builds of torch without CUDA lack the symbol, and the library must load there too.
  using Getter = int32_t (*)(int32_t, void**);
  static const auto getter = reinterpret_cast<Getter>(dlsym(RTLD_DEFAULT, "aoti_torch_get_current_cuda_stream"));
  STD_TORCH_CHECK(getter != nullptr, "megadiff: this build of torch has no CUDA streams");
  void* stream = nullptr;
  STD_TORCH_CHECK(getter(tensor.get_device_index(), &stream) == 0, "megadiff: torch gave no current CUDA stream");
  return stream;
}

void parallel_range(int64_t count, int64_t grain, RangeBody body, const void* context) {
  torch::stable::parallel_for(
      0, count, grain, [body, context](int64_t begin, int64_t end) { body(begin, end, context); });
}

}  // namespace megadiff
