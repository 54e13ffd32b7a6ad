/* tanh of lanes: the polynomial of the Cephes library's tanhf near 0, else (1 - e) / (1 + e) with e = exp(-2 |x|). */
#ifndef TREEATTN_HYPERBOLIC_TANGENT_H
#define TREEATTN_HYPERBOLIC_TANGENT_H

#include "simd.h"

INLINE vector hyperbolic_tangent(vector x) {
  static const float polynomial[] = {-5.70498872745e-3f, 2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f,
                                     -3.33332819422e-1f};
  const vector_bits sign = (vector_bits)x & 0x80000000u;
  const vector magnitude = (vector)((vector_bits)x & 0x7fffffffu), square = x * x;
  vector small = splat(polynomial[0]);
  for (int i = 1; i < 5; ++i) small = multiply_add(small, square, splat(polynomial[i]));
  small = multiply_add(small * square, x, x);
  const vector e = exponential_lanes(magnitude * splat(-2.0f)), large = (splat(1.0f) - e) / (splat(1.0f) + e);
  const vector_bits near = (vector_bits)(magnitude < 0.625f);
  return (vector)(((vector_bits)small & near) | (((vector_bits)large | sign) & ~near));
}

#endif
