/* What is done to scores before the softmax where a query's visibility asks for it: a soft cap, ALiBi. */
#ifndef TREEATTN_ADJUST_SCORES_H
#define TREEATTN_ADJUST_SCORES_H

#include "simd.h"

enum { BLOCK = 16 };

/* For the rows and the tokens of one block. A row's ALiBi is slope * (position - base): the base lies among its own
 * tokens, since a distance to a far query would swallow a score's digits; write_records() makes good for it. */
struct adjustment {
  float softcap; /* 0: none */
  int alibi;
  const double *slope, *base; /* [rows] */
  double position[BLOCK];
};

/* tanh: the polynomial of the Cephes library's tanhf near 0, else (1 - e) / (1 + e) with e = exp(-2 |x|). */
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

static void adjust_scores(const struct adjustment *a, int rows, float (*scores)[BLOCK]) {
  for (int r = 0; r < rows; ++r) {
    if (a->softcap > 0)
      for (int i = 0; i < BLOCK; i += WIDTH) {
        const vector score = load(scores[r] + i);
        store(scores[r] + i, splat(a->softcap) * hyperbolic_tangent(score / splat(a->softcap)));
      }
    if (a->alibi)
      for (int i = 0; i < BLOCK; ++i) scores[r][i] += (float)(a->slope[r] * (a->position[i] - a->base[r]));
  }
}

#endif
