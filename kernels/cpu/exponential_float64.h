/* exp and tanh of float64 from basic operations: the same bits on every processor, and in treeattn/bins.py. */
#ifndef TREEATTN_EXPONENTIAL_FLOAT64_H
#define TREEATTN_EXPONENTIAL_FLOAT64_H

#include <math.h>

/* x = power * ln 2 + rest; returns the power. */
static inline double reduce(double x, double *rest) {
  const double power = rint(x * 1.4426950408889634);
  *rest = (x - power * 6.93147180369123816490e-01) - power * 1.90821492927058770002e-10;
  return power;
}

/* exp(x) for x <= 0, in absolute terms. */
static inline double small_exponential(double x) {
  static const double factor[] = {1.0 / 6227020800.0,
                                  1.0 / 479001600.0,
                                  1.0 / 39916800.0,
                                  1.0 / 3628800.0,
                                  1.0 / 362880.0,
                                  1.0 / 40320.0,
                                  1.0 / 5040.0,
                                  1.0 / 720.0,
                                  1.0 / 120.0,
                                  1.0 / 24.0,
                                  1.0 / 6.0,
                                  1.0 / 2.0,
                                  1.0,
                                  1.0};
  double rest;
  const double power = reduce(x < -700.0 ? -700.0 : x, &rest);
  double value = factor[0];
  for (int i = 1; i < 14; ++i) value = value * rest + factor[i];
  return ldexp(value, (int)power);
}

/* cap * tanh(x / cap) */
static inline double soft_capped(double x, double cap) {
  const double small = small_exponential(fabs(x / cap) * -2.0);
  return copysign(cap * ((1.0 - small) / (1.0 + small)), x);
}

#endif
