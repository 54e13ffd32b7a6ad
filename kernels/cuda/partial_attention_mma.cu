// Records of many rows that share a KV head, by tensor cores: float16 and bfloat16. Rows go in tiles of 16, tokens in
// tiles of 64, one quarter for each warp; keys and values arrive by asynchronous copies, STAGES tiles deep.
//
// Scores and sums are float32. Weights are rounded to 16 bits for their product with the values: |out - exact| can
// reach 4e-3 * max|v|; max and denominator do not see the rounding.
#include "attention.cuh"

constexpr int ROWS = 16, TILE = 64, TOKENS_PER_WARP = TILE / WARPS;

// A tile of keys and one of values for each stage. Rows are padded so that the eight rows of a matrix lie in
// different banks of shared memory.
template <typename T, int HEAD_DIM, int STAGES> struct Stages {
  static constexpr int PITCH = HEAD_DIM + 8, VECTORS = HEAD_DIM / 8;
  T *keys, *values;

  __device__ __forceinline__ T *key(int stage, int token) const { return keys + (stage * TILE + token) * PITCH; }
  __device__ __forceinline__ T *value(int stage, int token) const { return values + (stage * TILE + token) * PITCH; }

  // Starts the copies of tile `tile` of the block's tokens, zeros beyond the end; always closes a group.
  __device__ __forceinline__ void start(const AttentionArguments &a, const Work &w, const T *k, const T *v, int tile,
                                        int tiles) const {
    if (tile < tiles) {
      const int stage = tile % STAGES;
      for (int e = threadIdx.x; e < TILE * VECTORS; e += THREADS) {
        const int row = e / VECTORS, index = e % VECTORS * 8, token = w.begin + tile * TILE + row;
        const bool valid = token < w.end;
        const long long from = valid ? token : w.end - 1;
        copy_async(key(stage, row) + index, k + from * a.k_token_stride + index, valid);
        copy_async(value(stage, row) + index, v + from * a.v_token_stride + index, valid);
      }
    }
    copy_async_commit();
  }
};

// Two 16-bit elements of q for the fragment of a row; zeros for rows that pad the tile.
template <typename T>
__device__ __forceinline__ unsigned load_query_pair(const AttentionArguments &a, const Work &w, int row, int index) {
  if (row >= w.rows) return 0u;
  const int head = w.kv_head * w.group + row % w.group, query = row / w.group;
  const T *q = static_cast<const T *>(a.q) + w.batch * a.q_batch_stride + query * a.q_query_stride +
               head * a.q_head_stride + index;
  return q[0].bits | (unsigned)q[1].bits << 16;
}

// A thread holds two rows of every fragment, lane / 4 and 8 more; `half` 0 and 1. Columns 2 (lane % 4) + 0, 1.
template <typename T, int HEAD_DIM, int STAGES>
__global__ void __launch_bounds__(THREADS) partial_attention_mma(const AttentionArguments a) {
  constexpr int STEPS = HEAD_DIM / 16, COLUMNS = HEAD_DIM / 8;
  static_assert(STAGES * TILE * (HEAD_DIM + 8) * sizeof(T) * 2 >= sizeof(float) * WARPS * ROWS * (HEAD_DIM + 2),
                "the warps' numerators reuse the stages");
  static_assert(WARPS * HEAD_DIM >= MAX_SPLITS, "so do the splits' weights");
  DYNAMIC_SHARED(T, shared);
  const Stages<T, HEAD_DIM, STAGES> stages{shared, shared + STAGES * TILE * (HEAD_DIM + 8)};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = lane % 4 * 2;
  const Work w = find_work(a, TILE);
  const int tiles = w.end > w.begin ? (w.end - w.begin + TILE - 1) / TILE : 0;
  const T *k = static_cast<const T *>(a.k) + w.batch * a.k_batch_stride + w.kv_head * a.k_head_stride;
  const T *v = static_cast<const T *>(a.v) + w.batch * a.v_batch_stride + w.kv_head * a.v_head_stride;
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) stages.start(a, w, k, v, i, tiles);

  const int rows[2] = {w.tile * ROWS + lane / 4, w.tile * ROWS + lane / 4 + 8};
  unsigned q[STEPS][4];
#pragma unroll
  for (int step = 0; step < STEPS; ++step)
#pragma unroll
    for (int j = 0; j < 4; ++j) q[step][j] = load_query_pair<T>(a, w, rows[j % 2], step * 16 + j / 2 * 8 + column);

  float numerator[COLUMNS][4], maximum[2] = {negative_infinity(), negative_infinity()}, denominator[2] = {0.0f, 0.0f};
#pragma unroll
  for (int n = 0; n < COLUMNS; ++n)
#pragma unroll
    for (int j = 0; j < 4; ++j) numerator[n][j] = 0.0f;

  for (int tile = 0; tile < tiles; ++tile) {
    copy_async_wait<STAGES - 2>();
    __syncthreads(); // everyone's copies of this tile are there, and nobody reads the stage that is filled next
    stages.start(a, w, k, v, tile + STAGES - 1, tiles);
    const int stage = tile % STAGES, first = warp * TOKENS_PER_WARP;

    float scores[2][4] = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}}; // of tokens 0..7 and 8..15
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      unsigned keys[4];
      load_matrices<false>(keys, stages.key(stage, first + lane / 16 * 8 + lane % 8) + step * 16 + lane / 8 % 2 * 8);
      multiply_matrices(scores[0], q[step], keys, T{});
      multiply_matrices(scores[1], q[step], keys + 2, T{});
    }
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int token = w.begin + tile * TILE + first + n * 8 + column + j % 2, row = rows[j / 2];
        const bool seen = token < w.end && (!a.mask || row >= w.rows || visible(a, w, row / w.group, token));
        scores[n][j] = seen ? scores[n][j] * a.scale : negative_infinity();
      }

    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = fmaxf(fmaxf(scores[0][2 * half], scores[0][2 * half + 1]),
                        fmaxf(scores[1][2 * half], scores[1][2 * half + 1]));
      top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 1)); // the four lanes that share the row
      top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 2));
      top = fmaxf(top, maximum[half]);
      const float base = top == negative_infinity() ? 0.0f : top; // -inf minus -inf would be NaN
      factor[half] = weigh(maximum[half] - base);
      maximum[half] = top;
      denominator[half] *= factor[half];
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int j = 2 * half; j < 2 * half + 2; ++j) {
          scores[n][j] = weigh(scores[n][j] - base);
          denominator[half] += scores[n][j];
        }
    }
    // The scores' layout is that of the left operand of the next product.
    const unsigned weights[4] = {pack(scores[0][0], scores[0][1], T{}), pack(scores[0][2], scores[0][3], T{}),
                                 pack(scores[1][0], scores[1][1], T{}), pack(scores[1][2], scores[1][3], T{})};
#pragma unroll
    for (int n = 0; n < COLUMNS; n += 2) {
      unsigned values[4];
      load_matrices<true>(values, stages.value(stage, first + lane / 8 % 2 * 8 + lane % 8) + n * 8 + lane / 16 * 8);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        numerator[n][j] *= factor[j / 2];
        numerator[n + 1][j] *= factor[j / 2];
      }
      multiply_matrices(numerator[n], weights, values, T{});
      multiply_matrices(numerator[n + 1], weights, values + 2, T{});
    }
  }
  copy_async_wait<0>();
  __syncthreads(); // the stages are free

  float *numerators = reinterpret_cast<float *>(shared);
  float *maxima = numerators + WARPS * ROWS * HEAD_DIM, *denominators = maxima + WARPS * ROWS;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int at = warp * ROWS + lane / 4 + 8 * half;
    denominator[half] += __shfl_xor_sync(ALL_LANES, denominator[half], 1);
    denominator[half] += __shfl_xor_sync(ALL_LANES, denominator[half], 2);
    if (lane % 4 == 0) {
      maxima[at] = maximum[half];
      denominators[at] = denominator[half];
    }
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) numerators[at * HEAD_DIM + n * 8 + column + j] = numerator[n][2 * half + j];
  }
  __syncthreads();
  merge_block<HEAD_DIM, ROWS, WARPS>(a, w, numerators, maxima, denominators);
  combine_splits<HEAD_DIM, ROWS>(a, w, numerators);
}
