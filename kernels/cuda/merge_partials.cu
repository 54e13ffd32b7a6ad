// Folds records into records, in the given order. Bits as treeattn/partial.py defines them.
#include "fold.cuh"

struct MergeArguments {
  float *into;             // [records, width], read and written
  const float *others;     // [count, records, width], folded in ascending order
  long long others_stride; // floats from one of the `count` to the next
  int records, width, count;
};

// One block for each record.
extern "C" __global__ void __launch_bounds__(128) merge_partials(const MergeArguments a) {
  float *into = a.into + (long long)blockIdx.x * a.width;
  const float *others = a.others + (long long)blockIdx.x * a.width;
  const auto record = [&](int source) { return source ? others + (source - 1) * a.others_stride : into; };
  fold_record(record, 1 + a.count, into, a.width);
}
