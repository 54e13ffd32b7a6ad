// Records (partials of one query head: max, denominator, numerator[head_dim]) and their merge, which
// treeattn/partial.py defines to the bit: every build for every processor gives the same bits.
#pragma once
#include "ptx.cuh"

constexpr int RECORD_MAX = 0, RECORD_DENOMINATOR = 1, RECORD_NUMERATOR = 2;

__device__ __forceinline__ float negative_infinity() { return __int_as_float(0xff800000); }
__device__ __forceinline__ float canonical_nan() { return __int_as_float(0x7fc00000); }

// One NaN for all: which operand's payload survives an operation differs between processors.
__device__ __forceinline__ float canonical(float value) { return value == value ? value : canonical_nan(); }

// exp(x) for x <= 0, to the bit as in kernels/cpu/exponential.h: Cody-Waite reduction, Cephes polynomial.
__device__ __forceinline__ float exponential(float x) {
  constexpr float ROUND_TO_INTEGER = 12582912.0f; // 1.5 * 2^23: adding it leaves no fraction bits
  if (x < -87.0f) return 0.0f;
  const float shifted = fma_exact(x, 1.44269504088896341f, ROUND_TO_INTEGER);
  const float power = add_exact(shifted, -ROUND_TO_INTEGER);
  float fraction = fma_exact(power, -0.693359375f, x);
  fraction = fma_exact(power, 2.12194440e-4f, fraction);
  float value = 1.9875691500e-4f;
  value = fma_exact(value, fraction, 1.3981999507e-3f);
  value = fma_exact(value, fraction, 8.3334519073e-3f);
  value = fma_exact(value, fraction, 4.1665795894e-2f);
  value = fma_exact(value, fraction, 1.6666665459e-1f);
  value = fma_exact(value, fraction, 5.0000001201e-1f);
  value = fma_exact(value, fraction, 1.0f);
  value = fma_exact(value, fraction, 1.0f);
  // The low bits of `shifted` hold the power as an integer: move them to the exponent field.
  return multiply_exact(value, __uint_as_float((__float_as_uint(shifted) + 127u) << 23));
}

// How two records merge, from their maxima alone: fma(factor, the smaller one's element, the larger one's).
struct MergeRule {
  float maximum; // of the merged record
  float factor;
  bool swap;  // the second record has the larger maximum
  bool alone; // the smaller record is the identity
  bool empty; // both are
  bool invalid;
};

__device__ __forceinline__ MergeRule merge_rule(float first, float second) {
  MergeRule rule;
  rule.swap = greater_exact(second, first);
  const float high = rule.swap ? second : first, low = rule.swap ? first : second;
  rule.invalid = first != first || second != second;
  rule.empty = high == negative_infinity();
  rule.alone = low == negative_infinity();
  rule.maximum = rule.invalid ? canonical_nan() : add_exact(high, 0.0f); // -0 and +0 are equal: always +0
  rule.factor = greater_exact(high, low) ? exponential(add_exact(low, -high)) : 1.0f;
  return rule;
}

// One element, the denominator or one of the numerator, of the merged record.
__device__ __forceinline__ float merge_element(const MergeRule &rule, float first, float second) {
  if (rule.invalid) return canonical_nan();
  if (rule.empty) return 0.0f;
  const float larger = rule.swap ? second : first, smaller = rule.swap ? first : second;
  return canonical(rule.alone ? larger : fma_exact(rule.factor, smaller, larger));
}
