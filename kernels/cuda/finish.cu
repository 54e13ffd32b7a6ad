// Records to attention output.
#include "finish.cuh"

// One block for each record.
extern "C" __global__ void __launch_bounds__(128) finish(const FinishArguments a) { finish_record(a, blockIdx.x); }
