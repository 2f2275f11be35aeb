// A vector of standard normals at a time by Box-Muller, with the float32 steps of megadiff/ops/philox.py.
#pragma once

#include "cpu/vector.h"

namespace megadiff::cpu::MEGADIFF_ISA {

typedef int32_t VecInts __attribute__((vector_size(4 * kLanes)));

MEGADIFF_INLINE Vec square_root(Vec x) {
  Vec roots;
  for (int64_t i = 0; i < kLanes; ++i) roots[i] = std::sqrt(x[i]);
  return roots;
}

// log(x) of normal numbers 0 < x < inf within about 1 ulp: x = 2^e (1 + m) and a polynomial of degree 9 in m.
MEGADIFF_INLINE Vec log_(Vec x) {
  const VecBits bits = VecBits(x);
  // Moves [sqrt(1/2), sqrt(2)) onto exponent 0.
  const VecBits moved = bits - 0x3f3504f3u;
  const VecInts exponent = VecInts(moved) >> 23;
  const Vec m = Vec((moved & 0x007fffffu) + 0x3f3504f3u) - 1.0f;
  const Vec e = __builtin_convertvector(exponent, Vec);
  Vec p = m * 7.0376836292e-2f - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  const Vec square = m * m;
  return (m + (p * m * square - 0.5f * square + e * -2.12194440e-4f)) + e * 0.693359375f;
}

// sin and cos of 0 <= x < 7 within about 1 ulp of 1: subtracts the nearest multiple of pi / 2 in three parts.
MEGADIFF_INLINE void sincos_(Vec x, Vec* sine, Vec* cosine) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23, see exp_
  const Vec shifted = x * 0.636619772f + kRound;
  const VecBits quadrant = VecBits(shifted);
  const Vec n = shifted - kRound;
  const Vec r = ((x - n * 1.5703125f) - n * 4.837512969970703125e-4f) - n * 7.549789948768648e-8f;
  const Vec z = r * r;
  const Vec s = ((z * -1.9515295891e-4f + 8.3321608736e-3f) * z - 1.6666654611e-1f) * z * r + r;
  const Vec c = ((z * 2.443315711809948e-5f - 1.388731625493765e-3f) * z + 4.166664568298827e-2f) * (z * z) -
                0.5f * z + 1.0f;
  const auto swapped = (quadrant & 1u) != 0u;
  const Vec sine_size = swapped ? c : s, cosine_size = swapped ? s : c;
  *sine = Vec(VecBits(sine_size) ^ ((quadrant & 2u) << 30));
  *cosine = Vec(VecBits(cosine_size) ^ (((quadrant + 1u) & 2u) << 30));
}

// The pair of normals of two vectors of words.
MEGADIFF_INLINE void box_muller(VecBits first, VecBits second, Vec* even, Vec* odd) {
  const Vec uniform = (__builtin_convertvector(first, Vec) + 0.5f) * 0x1p-32f;
  const Vec radius = square_root(log_(uniform) * -2.0f);
  sincos_(__builtin_convertvector(second, Vec) * (6.28318530717958647692f * 0x1p-32f), odd, even);
  *even *= radius;
  *odd *= radius;
}

}  // namespace megadiff::cpu::MEGADIFF_ISA
