// Puts a rank's records on the scale of the largest maxima over all ranks, so that plain sums fold them.
#include "state.cuh"

struct RescaleArguments {
  const float *records; // [records, width]
  const float *maxima;  // [records], over all ranks
  float *denominators;  // [records] and [records, width - 2], written; they may be the records' own
  float *numerators;
  long long denominator_stride; // elements between records
  long long numerator_stride;
  int width;
};

// One block for each record. A sum of what this leaves behind is what treeattn/partial.py merges to, but for the
// order of the additions. Maxima are only read, and every other element by the thread that writes it.
extern "C" __global__ void __launch_bounds__(128) rescale(const RescaleArguments a) {
  const float *record = a.records + (long long)blockIdx.x * a.width;
  float *denominator = a.denominators + (long long)blockIdx.x * a.denominator_stride;
  float *numerator = a.numerators + (long long)blockIdx.x * a.numerator_stride;
  const float own = record[RECORD_MAX], highest = a.maxima[blockIdx.x];
  const bool invalid = own != own || highest != highest, empty = own == negative_infinity();
  const float factor = greater_exact(highest, own) ? exponential(add_exact(own, -highest)) : 1.0f;
  for (int e = RECORD_DENOMINATOR + threadIdx.x; e < a.width; e += blockDim.x) {
    const float value = empty ? 0.0f : multiply_exact(factor, record[e]);
    float *place = e == RECORD_DENOMINATOR ? denominator : numerator + (e - RECORD_NUMERATOR);
    *place = invalid ? canonical_nan() : canonical(value);
  }
}
