// From run-time dtypes to element types.
#pragma once

#include "cpu/vector.h"

namespace megadiff::cpu::MEGADIFF_ISA {

template <class T>
struct Type {
  using type = T;
};

// Calls f(Type<T>{}) with the element type of a dtype.
template <class F>
MEGADIFF_INLINE void with_type(Dtype dtype, const F& f) {
  switch (dtype) {
    case Dtype::kFloat32: return f(Type<float>{});
    case Dtype::kBFloat16: return f(Type<BFloat16>{});
    case Dtype::kFloat16: return f(Type<Float16>{});
  }
}

// Calls f(Type<T>{}, Type<P>{}), where the second dtype is the first or float32.
template <class F>
MEGADIFF_INLINE void with_types(Dtype dtype, Dtype same_or_float, const F& f) {
  with_type(dtype, [&](auto type) {
    if (same_or_float == Dtype::kFloat32)
      f(type, Type<float>{});
    else
      f(type, type);
  });
}

}  // namespace megadiff::cpu::MEGADIFF_ISA
