/* exp for arguments <= 0: Cody-Waite reduction, then the polynomial of the Cephes library's expf.
 * treeattn/partial.py has the same numbers and the same steps; the two agree to the bit. */
#ifndef TREEATTN_EXPONENTIAL_H
#define TREEATTN_EXPONENTIAL_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define EXP_LOWEST (-87.0f) /* below it the result is 0; down to it 2^r and exp(x) are normal numbers */
#define EXP_LOG2_E 1.44269504088896341f
#define EXP_ROUND_TO_INTEGER 12582912.0f /* 1.5 * 2^23: adding it leaves no fraction bits */
#define EXP_LN2_HIGH 0.693359375f
#define EXP_LN2_LOW (-2.12194440e-4f)
#define EXP_DEGREE 7
static const float exp_polynomial[EXP_DEGREE + 1] = {
    1.9875691500e-4f,
    1.3981999507e-3f,
    8.3334519073e-3f,
    4.1665795894e-2f,
    1.6666665459e-1f,
    5.0000001201e-1f,
    1.0f,
    1.0f,
};

static inline float float_from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static inline uint32_t bits_from_float(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

/* exp(x) for x <= 0, x not NaN: the factor that rescales a partial. Bit-defined: fmaf only. */
static inline float exponential(float x) {
  if (x < EXP_LOWEST) return 0.0f;
  float shifted = fmaf(x, EXP_LOG2_E, EXP_ROUND_TO_INTEGER);
  float power = shifted - EXP_ROUND_TO_INTEGER;
  float fraction = fmaf(power, -EXP_LN2_HIGH, x);
  fraction = fmaf(power, -EXP_LN2_LOW, fraction);
  float value = exp_polynomial[0];
  for (int i = 1; i <= EXP_DEGREE; ++i) value = fmaf(value, fraction, exp_polynomial[i]);
  /* The low bits of `shifted` hold the power as an integer: move them to the exponent field. */
  return value * float_from_bits((bits_from_float(shifted) + 127u) << 23);
}

#endif
