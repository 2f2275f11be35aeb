// From run-time dtypes to element types, on the host side of a launch.
#pragma once

#include "cuda/primitives.h"

namespace megadiff::cuda {

template <class T>
struct Type {
  using type = T;
};

// Calls f(Type<T>{}) with the element type of a dtype.
template <class F>
void with_type(Dtype dtype, const F& f) {
  switch (dtype) {
    case Dtype::kFloat32: return f(Type<float>{});
    case Dtype::kBFloat16: return f(Type<BFloat16>{});
    case Dtype::kFloat16: return f(Type<Float16>{});
  }
}

// Calls f(Type<T>{}, Type<P>{}), where the second dtype is the first or float32.
template <class F>
void with_types(Dtype dtype, Dtype same_or_float, const F& f) {
  with_type(dtype, [&](auto type) {
    if (same_or_float == Dtype::kFloat32)
      f(type, Type<float>{});
    else
      f(type, type);
  });
}

inline int64_t ceil_divide(int64_t count, int64_t size) { return (count + size - 1) / size; }

}  // namespace megadiff::cuda
