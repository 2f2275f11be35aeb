// Splits work over the CPU threads of whoever loaded the library. Knows nothing of torch: the bindings implement it.
#pragma once

#include <cstdint>

namespace megadiff {

// Work on fewer elements than this is not worth another thread.
constexpr int64_t kGrainElements = 16384;

using RangeBody = void (*)(int64_t begin, int64_t end, const void* context);

void parallel_range(int64_t count, int64_t grain, RangeBody body, const void* context);

// Calls f(begin, end) on parts of [0, count) of at least `grain` items, on several threads if there are any.
template <class F>
inline void parallel_for(int64_t count, int64_t grain, const F& f) {
  parallel_range(
      count, grain, [](int64_t begin, int64_t end, const void* context) { (*static_cast<const F*>(context))(begin, end); },
      &f);
}

}  // namespace megadiff
