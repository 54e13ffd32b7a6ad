// A logsumexp from one base to another. Bits as treeattn/backends/cpu/records.py.
#include "state.cuh"

// treeattn/backends/cuda/records.py has the same fields in the same order.
struct ScaleArguments {
  float *lse; // [count], read and written
  double factor;
  long long count;
};

extern "C" __global__ void __launch_bounds__(128) scale_lse(const ScaleArguments a) {
  const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < a.count) a.lse[i] = canonical(narrow_exact(__dmul_rn(widen_exact(a.lse[i]), a.factor)));
}
