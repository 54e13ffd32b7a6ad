#ifndef TREEATTN_LOGARITHM_H
#define TREEATTN_LOGARITHM_H

#include <math.h>

/* Natural logarithm of a positive number: treeattn/partial.py has the same steps. */
static inline double logarithm(double x) {
  int exponent;
  double mantissa = frexp(x, &exponent);
  if (mantissa < 0.70710678118654752) {
    mantissa += mantissa;
    exponent -= 1;
  }
  double ratio = (mantissa - 1.0) / (mantissa + 1.0); /* ln(m) = 2 atanh((m - 1) / (m + 1)) */
  double square = ratio * ratio, series = 1.0 / 21.0;
  for (int odd = 19; odd > 0; odd -= 2) series = series * square + 1.0 / odd;
  return exponent * 0.6931471805599453 + (ratio + ratio) * series;
}

#endif
