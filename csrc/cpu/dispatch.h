// Chooses the widest instruction set that this machine has and that was compiled in.
#pragma once

#include "common/types.h"

namespace megadiff::cpu {

enum class Isa { kBaseline, kAvx2, kAvx512 };

Isa widest_isa();

}  // namespace megadiff::cpu

// Defines megadiff::cpu::NAME(args) for functions that cpu/*.cpp defines in the namespace of each instruction set.
// RESULT and the argument list are those of the declaration in common/.
#ifdef MEGADIFF_X86
#define MEGADIFF_DECLARE_ISA(RESULT, NAME, ...) \
  namespace baseline { RESULT NAME(__VA_ARGS__); } \
  namespace avx2 { RESULT NAME(__VA_ARGS__); } \
  namespace avx512 { RESULT NAME(__VA_ARGS__); }
#define MEGADIFF_CALL_ISA(NAME, ...) \
  switch (widest_isa()) { \
    case Isa::kAvx512: return avx512::NAME(__VA_ARGS__); \
    case Isa::kAvx2: return avx2::NAME(__VA_ARGS__); \
    default: return baseline::NAME(__VA_ARGS__); \
  }
#else
#define MEGADIFF_DECLARE_ISA(RESULT, NAME, ...) \
  namespace baseline { RESULT NAME(__VA_ARGS__); }
#define MEGADIFF_CALL_ISA(NAME, ...) return baseline::NAME(__VA_ARGS__);
#endif

// For a kernel that takes its arguments struct and nothing else.
#define MEGADIFF_DISPATCH(ARGS, NAME) \
  namespace megadiff::cpu { \
  MEGADIFF_DECLARE_ISA(void, NAME, const ARGS& args) \
  void NAME(const ARGS& args, Stream) { MEGADIFF_CALL_ISA(NAME, args) } \
  }

// For a function that says how many floats of workspace a kernel needs.
#define MEGADIFF_WORKSPACE(ARGS, NAME) \
  namespace megadiff::cpu { \
  MEGADIFF_DECLARE_ISA(int64_t, NAME, const ARGS& args) \
  int64_t NAME(const ARGS& args) { MEGADIFF_CALL_ISA(NAME, args) } \
  }
