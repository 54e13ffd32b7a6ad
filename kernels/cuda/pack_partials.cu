// Finished parts, as other kernels leave them, to records, or the identity where nothing was seen. With m the
// natural lse as float32 and d = exp(lse - m): (m, d, d * out). Bits as treeattn/backends/cpu/records.py.
#include "attention.cuh"

// treeattn/backends/cuda/records.py has the same fields in the same order.
struct PackArguments {
  const void *out;  // [records, head_dim]
  const float *lse; // [records], of any base
  float *records;   // [records, head_dim + 2], written
  double factor;    // natural logarithm of the base
  int head_dim;
  int out_type; // ElementType
};

__device__ __forceinline__ float load_element(const PackArguments &a, long long at) {
  if (a.out_type == FLOAT32) return static_cast<const float *>(a.out)[at];
  if (a.out_type == FLOAT16) return to_float(static_cast<const float16 *>(a.out)[at]);
  return to_float(static_cast<const bfloat16 *>(a.out)[at]);
}

// exp of what the rounding of a maximum left, of which no more than 1 counts.
__device__ __forceinline__ float exponential_of_rest(double rest) {
  const float small = narrow_exact(rest < -1.0 ? -1.0 : rest > 1.0 ? 1.0 : rest);
  const bool positive = greater_exact(small, 0.0f);
  const float value = exponential(positive ? -small : small);
  return positive ? divide_exact(1.0f, value) : value;
}

// One block for each record.
extern "C" __global__ void __launch_bounds__(128) pack_partials(const PackArguments a) {
  const long long part = blockIdx.x, width = a.head_dim + RECORD_NUMERATOR;
  float *record = a.records + part * width;
  const double natural = __dmul_rn(widen_exact(a.lse[part]), a.factor);
  const float maximum = narrow_exact(natural);
  // An infinite or NaN lse marks a part that saw nothing, whatever its out holds.
  const bool seen = greater_exact(maximum, negative_infinity()) && greater_exact(-negative_infinity(), maximum);
  const float denominator = exponential_of_rest(__dadd_rn(natural, -widen_exact(maximum)));
  if (threadIdx.x == 0) {
    record[RECORD_MAX] = seen ? maximum : negative_infinity();
    record[RECORD_DENOMINATOR] = seen ? denominator : 0.0f;
  }
  for (int i = threadIdx.x; i < a.head_dim; i += blockDim.x)
    record[RECORD_NUMERATOR + i] =
        seen ? canonical(multiply_exact(load_element(a, part * a.head_dim + i), denominator)) : 0.0f;
}
