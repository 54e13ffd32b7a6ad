// Finished parts, as other kernels leave them, to records: (lse, 1, out), or the identity where nothing was seen.
// Bits as treeattn/backends/cpu/pack.py.
#include "attention.cuh"

// treeattn/backends/cuda/pack.py has the same fields in the same order.
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

// One block for each record.
extern "C" __global__ void __launch_bounds__(128) pack_partials(const PackArguments a) {
  const long long part = blockIdx.x, width = a.head_dim + RECORD_NUMERATOR;
  float *record = a.records + part * width;
  const float maximum = narrow_exact(__dmul_rn(widen_exact(a.lse[part]), a.factor));
  // An infinite or NaN lse marks a part that saw nothing, whatever its out holds.
  const bool seen = greater_exact(maximum, negative_infinity()) && greater_exact(-negative_infinity(), maximum);
  if (threadIdx.x == 0) {
    record[RECORD_MAX] = seen ? maximum : negative_infinity();
    record[RECORD_DENOMINATOR] = seen ? 1.0f : 0.0f;
  }
  for (int i = threadIdx.x; i < a.head_dim; i += blockDim.x)
    record[RECORD_NUMERATOR + i] = seen ? load_element(a, part * a.head_dim + i) : 0.0f;
}
