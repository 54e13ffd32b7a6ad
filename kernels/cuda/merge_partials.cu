// Folds records into records, in the given order. Bits as treeattn/partial.py defines them.
#include "state.cuh"

struct MergeArguments {
  float *into;             // [records, width], read and written
  const float *others;     // [count, records, width], folded in ascending order
  long long others_stride; // floats from one of the `count` to the next
  int records, width, count;
};

// One block for each record.
extern "C" __global__ void __launch_bounds__(128) merge_partials(const MergeArguments a) {
  const long long start = (long long)blockIdx.x * a.width;
  float *into = a.into + start;
  const float *others = a.others + start;
  const float maximum = into[RECORD_MAX];
  __syncthreads(); // everyone has read the maximum before anyone writes it
  for (int e = threadIdx.x; e < a.width; e += blockDim.x) {
    float merged_maximum = maximum, value = into[e];
    for (int i = 0; i < a.count; ++i) {
      const float *other = others + i * a.others_stride;
      const MergeRule rule = merge_rule(merged_maximum, other[RECORD_MAX]);
      merged_maximum = rule.maximum;
      value = e == RECORD_MAX ? rule.maximum : merge_element(rule, value, other[e]);
    }
    into[e] = value;
  }
}
