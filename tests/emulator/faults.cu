// Small kernels with one fault each, to see that the emulator and the sanitizers catch it.

struct alignas(16) Four {
  float a, b, c, d;
};

extern "C" __global__ void divergent_barrier(float *x) {
  if (threadIdx.x < 16) __syncthreads();
  x[threadIdx.x] = 1.0f;
}

extern "C" __global__ void mask_names_absent_lanes(float *x) {
  float value = threadIdx.x;
  if (threadIdx.x < 8) value = __shfl_xor_sync(0xffffffffu, value, 1);
  x[threadIdx.x] = value;
}

extern "C" __global__ void caller_not_in_mask(float *x) { x[threadIdx.x] = __shfl_xor_sync(0xffu, 1.0f, 1); }

extern "C" __global__ void different_operations(float *x) {
  if (threadIdx.x & 1)
    x[threadIdx.x] = __ballot_sync(0xffffffffu, 1);
  else
    x[threadIdx.x] = __shfl_sync(0xffffffffu, 1.0f, 0);
}

extern "C" __global__ void uninitialised_shared(float *x) {
  __shared__ float values[64];
  if (threadIdx.x < 32) values[threadIdx.x] = 1.0f;
  __syncthreads();
  x[threadIdx.x] = values[threadIdx.x];
}

extern "C" __global__ void shared_race(float *x) {
  __shared__ float values[64];
  values[threadIdx.x] = 1.0f;
  x[threadIdx.x] = values[63 - threadIdx.x];
}

extern "C" __global__ void beyond_shared(float *x) {
  DYNAMIC_SHARED(float, values);
  values[threadIdx.x] = 1.0f;
  __syncthreads();
  x[threadIdx.x] = values[threadIdx.x + 1];
}

extern "C" __global__ void beyond_global(float *x) { x[threadIdx.x + 1] = 1.0f; }

extern "C" __global__ void misaligned_load(float *x) {
  const Four four = *reinterpret_cast<const Four *>(x + 1);
  x[threadIdx.x] = four.a;
}

// Pairs of blocks that look at each other's shared memory, and which way each of them is wrong.
struct alignas(8) Two {
  float a, b;
};

enum Exchange { RIGHT, BEGINS_LATE, ENDS_EARLY, LEAVES, HALF_COMES, NO_SUCH_BLOCK, NOT_SHARED };

template <int HOW> __global__ void __cluster_dims__(2, 1, 1) exchange(float *x) {
  __shared__ Two own;
  if (threadIdx.x == 0) own = {blockIdx.x + 1.0f, 0.0f};
  if (HOW == LEAVES && blockIdx.x % 2) return;
  if (HOW != BEGINS_LATE) meet_cluster();
  const Two *at = HOW == NOT_SHARED ? reinterpret_cast<const Two *>(x) : &own;
  const Two other = load_of_block(at, HOW == NO_SUCH_BLOCK ? 2 : 1 - (int)blockIdx.x % 2);
  if (threadIdx.x == 0) x[blockIdx.x] = other.a;
  if (HOW != ENDS_EARLY && (HOW != HALF_COMES || threadIdx.x < 32)) meet_cluster();
}

extern "C" __global__ void meets_without_a_cluster(float *x) { meet_cluster(); }
