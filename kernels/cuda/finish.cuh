// A record to attention output: numerator / denominator and max + ln(denominator), bits as treeattn/partial.py
// defines them.
#pragma once
#include "state.cuh"

struct FinishArguments {
  const float *records; // [batch, heads, queries, head_dim + 2]
  float *out;           // [batch, queries, heads, head_dim]
  float *lse;           // [batch, heads, queries]
  int heads, queries, head_dim;
};

// Natural logarithm of a positive number that was a float32. Separate roundings: nothing may be contracted.
__device__ double logarithm(double x) {
  int exponent;
  double mantissa = frexp(x, &exponent);
  if (mantissa < 0.70710678118654752) {
    mantissa += mantissa;
    exponent -= 1;
  }
  const double ratio = (mantissa - 1.0) / (mantissa + 1.0); // ln(m) = 2 atanh((m - 1) / (m + 1))
  const double square = __dmul_rn(ratio, ratio);
  double series = 1.0 / 21.0;
  for (int odd = 19; odd > 0; odd -= 2) series = __dadd_rn(__dmul_rn(series, square), 1.0 / odd);
  return __dadd_rn(__dmul_rn(exponent, 0.6931471805599453), __dmul_rn(ratio + ratio, series));
}

// What becomes of a record's elements, from its maximum and denominator.
struct Quotient {
  float maximum, denominator;
  bool empty, valid; // neither: NaN

  __device__ __forceinline__ Quotient(float maximum, float denominator) : maximum(maximum), denominator(denominator) {
    const bool bounded = greater_exact(-negative_infinity(), maximum); // not for NaN
    const bool positive = greater_exact(denominator, 0.0f), negative = greater_exact(0.0f, denominator);
    const bool zero = denominator == denominator && !positive && !negative;
    empty = maximum == negative_infinity() || (bounded && zero);
    valid = bounded && !empty && positive && greater_exact(-negative_infinity(), denominator);
  }

  __device__ __forceinline__ float of(float numerator) const {
    return valid ? canonical(divide_exact(numerator, denominator)) : empty ? 0.0f : canonical_nan();
  }

  __device__ __forceinline__ float lse() const {
    const double total = __dadd_rn(widen_exact(maximum), logarithm(widen_exact(denominator)));
    return valid ? narrow_exact(total) : empty ? negative_infinity() : canonical_nan();
  }
};

// One record by one block.
__device__ void finish_record(const FinishArguments &a, int index) {
  const int query = index % a.queries, head = index / a.queries % a.heads;
  const long long batch = index / a.queries / a.heads;
  const float *record = a.records + (long long)index * (a.head_dim + RECORD_NUMERATOR);
  float *out = a.out + ((batch * a.queries + query) * a.heads + head) * a.head_dim;
  const Quotient quotient(record[RECORD_MAX], record[RECORD_DENOMINATOR]);
  for (int i = threadIdx.x; i < a.head_dim; i += blockDim.x) out[i] = quotient.of(record[RECORD_NUMERATOR + i]);
  if (threadIdx.x == 0) a.lse[index] = quotient.lse();
}
