// Puts a rank's records on the scale of the largest maxima over all ranks, so that plain sums fold them.
#include "state.cuh"

struct RescaleArguments {
  float *records;      // [records, width], read and written
  const float *maxima; // [records], over all ranks
  int width;
  int keep_maximum; // 0: leave 0 in its place, for all ranks but one, so that the sum over ranks is the maximum
};

// One block for each record. A sum of what this leaves behind is what treeattn/partial.py merges to, but for the
// order of the additions.
extern "C" __global__ void __launch_bounds__(128) rescale(const RescaleArguments a) {
  float *record = a.records + (long long)blockIdx.x * a.width;
  const float own = record[RECORD_MAX], highest = a.maxima[blockIdx.x];
  __syncthreads(); // everyone has read the maximum before anyone writes it
  const bool invalid = own != own || highest != highest, empty = own == negative_infinity();
  const float factor = greater_exact(highest, own) ? exponential(add_exact(own, -highest)) : 1.0f;
  for (int e = threadIdx.x; e < a.width; e += blockDim.x) {
    float value = empty ? 0.0f : multiply_exact(factor, record[e]);
    if (e == RECORD_MAX) value = a.keep_maximum ? highest : 0.0f;
    record[e] = invalid ? canonical_nan() : canonical(value);
  }
}
