// The maxima of records, to be reduced by a library's max, which need not pass NaN on: +inf stands for it, and
// finishes as NaN too.
#include "state.cuh"

struct TakeMaximaArguments {
  const float *records; // [count, width]
  float *maxima;        // [count], written
  int count;
  int width;
};

extern "C" __global__ void __launch_bounds__(128) take_maxima(const TakeMaximaArguments a) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= a.count) return;
  const float maximum = a.records[(long long)i * a.width + RECORD_MAX];
  a.maxima[i] = maximum == maximum ? maximum : -negative_infinity();
}
