// Records of many rows that share a KV head, by tensor cores: float16 and bfloat16. Rows go in tiles of 16, tokens in
// tiles of 64, one quarter for each warp; keys and values arrive by asynchronous copies, STAGES tiles deep.
//
// Scores and sums are float32. Weights are rounded to 16 bits for their product with the values: |out - exact| can
// reach 4e-3 * max|v|; max and denominator do not see the rounding.
#include "combine.cuh"
#include "fragments.cuh"

constexpr int ROWS = 16, TILE = 64, TOKENS_PER_WARP = TILE / WARPS;

// Where tile `tile` of the block's lies. Registers are what this kernel has least of: all tokens are counted by tiles,
// only spans are walked along.
template <typename Tokens> __device__ __forceinline__ Place tile_place(const Tokens &tokens, int tile) {
  if constexpr (Tokens::CHOSEN) return tokens.at;
  return {tokens.at.start + tile * TILE, tokens.at.end};
}

template <typename Tokens> __device__ __forceinline__ void walk(const AttentionArguments &a, Tokens &tokens) {
  if constexpr (Tokens::CHOSEN) tokens.template advance<TILE>(a);
}

// A tile of keys and one of values for each stage. Rows are padded so that the eight rows of a matrix lie in
// different banks of shared memory.
template <typename T, int HEAD_DIM, int STAGES> struct Stages {
  static constexpr int PITCH = HEAD_DIM + 8, VECTORS = HEAD_DIM / 8;
  T *keys, *values;

  __device__ __forceinline__ T *key(int stage, int token) const { return keys + (stage * TILE + token) * PITCH; }
  __device__ __forceinline__ T *value(int stage, int token) const { return values + (stage * TILE + token) * PITCH; }

  // Starts the copies of a tile of tokens, zeros beyond the end and for drafts that no row sees; always closes a group.
  template <typename Tokens>
  __device__ __forceinline__ void start(const AttentionArguments &a, const Tokens &tokens, const T *k, const T *v,
                                        int tile) const {
    static_assert(TILE * VECTORS % THREADS == 0, "as many copies for each thread");
    const int stage = tile % STAGES;
    const Place at = tile_place(tokens, tile);
    if (at.start < at.end) {
      if constexpr (!Tokens::PAGED) {
        k += at.start * a.k_token_stride;
        v += at.start * a.v_token_stride;
      }
      if constexpr (Tokens::CHOSEN) {
        const Views<ROWS> &views = tokens.template views<ROWS>();
        if (at.end > views.tile.draft_begin) {
#pragma unroll 1
          for (int e = threadIdx.x; e < TILE * VECTORS; e += THREADS) {
            const int token = at.start + e / VECTORS;
            copy<Tokens>(a, k, v, stage, e, at, token < at.end && any_sees(views, token));
          }
          copy_async_commit();
          return;
        }
      }
#pragma unroll 8 // all but at head_dim 256, where more addresses than these are more than there are registers
      for (int i = 0; i < TILE * VECTORS / THREADS; ++i) {
        const int e = i * THREADS + threadIdx.x;
        copy<Tokens>(a, k, v, stage, e, at, at.start + e / VECTORS < at.end);
      }
    }
    copy_async_commit();
  }

  // Vector e of the keys and values of the tile at `at`, which begin at k and v; the pages do, where there are any.
  template <typename Tokens>
  __device__ __forceinline__ void copy(const AttentionArguments &a, const T *k, const T *v, int stage, int e,
                                       const Place &at, bool valid) const {
    const int row = e / VECTORS, index = e % VECTORS * 8;
    if constexpr (Tokens::PAGED) {
      const int token = at.start + row, page = valid ? find_page(a, token) : -1;
      valid = page >= 0;
      k += valid ? row_in_page(a, page, token, a.k_batch_stride, a.k_token_stride) : 0;
      v += valid ? row_in_page(a, page, token, a.v_batch_stride, a.v_token_stride) : 0;
    } else {
      const long long from = valid ? row : 0;
      k += from * a.k_token_stride;
      v += from * a.v_token_stride;
    }
    copy_async(key(stage, row) + index, k + index, valid);
    copy_async(value(stage, row) + index, v + index, valid);
  }
};

// A thread holds two rows of every fragment, lane / 4 and 8 more; `half` 0 and 1. Columns 2 (lane % 4) + 0, 1.
template <typename T, int HEAD_DIM, int STAGES, typename Tokens = AllTokens>
__global__ void __launch_bounds__(THREADS) partial_attention_mma(const AttentionArguments a) {
  constexpr int STEPS = HEAD_DIM / 16, COLUMNS = HEAD_DIM / 8;
  constexpr int PITCH = HEAD_DIM + 8; // of numerators, in floats: rows of one column lie in different banks
  constexpr int BYTES = STAGES * TILE * (HEAD_DIM + 8) * 2 * sizeof(T);
  static_assert(BYTES >= sizeof(float) * WARPS * ROWS * (PITCH + 2), "the warps' numerators reuse the stages");
  static_assert(BYTES >= sizeof(float) * Readers<HEAD_DIM, ROWS>::SHARED, "so does the merge of splits");
  DYNAMIC_SHARED(T, shared);
  const Stages<T, HEAD_DIM, STAGES> stages{shared, shared + STAGES * TILE * (HEAD_DIM + 8)};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = lane % 4 * 2;
  const Work w = find_work(a, ROWS);
  Tokens tokens(a, w);

  constexpr int PIECES = HEAD_DIM / QueryPiece::ELEMENTS, LOADS = (ROWS * PIECES + THREADS - 1) / THREADS;
  Vector pieces[LOADS];
#pragma unroll
  for (int i = 0; i < LOADS; ++i) {
    const int e = i * THREADS + threadIdx.x;
    pieces[i] = load_query(a, w, ROWS, e / PIECES, e % PIECES * QueryPiece::ELEMENTS).half[0];
  }
  tokens.template find<TILE>(a, w);
  if constexpr (Tokens::CHOSEN) {
    tokens.template load_views<ROWS>(a, w);
    __syncthreads(); // the views are there
  }
  const T *k = static_cast<const T *>(a.k) + w.kv_head * a.k_head_stride;
  const T *v = static_cast<const T *>(a.v) + w.kv_head * a.v_head_stride;
  if constexpr (!Tokens::PAGED) {
    k += w.batch * a.k_batch_stride;
    v += w.batch * a.v_batch_stride;
  }
  Tokens ahead = tokens;
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) {
    stages.start(a, ahead, k, v, i);
    walk(a, ahead);
  }

  // q goes through the last stage, which the first turn of the loop fills, after a barrier of its own.
#pragma unroll
  for (int i = 0; i < LOADS; ++i) {
    const int e = i * THREADS + threadIdx.x;
    if (e < ROWS * PIECES) {
      T *to = stages.key(STAGES - 1, e / PIECES) + e % PIECES * QueryPiece::ELEMENTS;
      *reinterpret_cast<Vector *>(to) = pieces[i];
    }
  }
  __syncthreads(); // q is there
  unsigned q[STEPS][4];
#pragma unroll
  for (int step = 0; step < STEPS; ++step)
    load_matrices<false>(q[step], stages.key(STAGES - 1, lane % 16) + step * 16 + lane / 16 * 8);
  const int rows[2] = {lane / 4, lane / 4 + 8};

  float numerator[COLUMNS][4];
  RowPair state;
#pragma unroll
  for (int n = 0; n < COLUMNS; ++n)
#pragma unroll
    for (int j = 0; j < 4; ++j) numerator[n][j] = 0.0f;

  for (int tile = 0; tile_place(tokens, tile).start < tokens.at.end; ++tile) {
    const Place at = tile_place(tokens, tile);
    copy_async_wait<STAGES - 2>();
    __syncthreads(); // everyone's copies of this tile are there, and nobody reads the stage that is filled next
    stages.start(a, ahead, k, v, tile + STAGES - 1);
    walk(a, ahead);
    const int stage = tile % STAGES, first = warp * TOKENS_PER_WARP;

    float scores[2][4] = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}}; // of tokens 0..7 and 8..15
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      unsigned keys[4];
      load_matrices<false>(keys, stages.key(stage, first + lane / 16 * 8 + lane % 8) + step * 16 + lane / 8 % 2 * 8);
      multiply_matrices(scores[0], q[step], keys, T{});
      multiply_matrices(scores[1], q[step], keys + 2, T{});
    }
    const int token = at.start + first + column;
    find_scores<TILE, ROWS>(a, tokens, at, token, rows, scores);
    walk(a, tokens);

    float factor[2];
    state.take(scores, factor);
    unsigned weights[4];
    pack_weights<T>(weights, scores, 0);
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
  float *maxima = numerators + WARPS * ROWS * PITCH, *denominators = maxima + WARPS * ROWS;
  state.sum_denominators();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int at = warp * ROWS + rows[half];
    if (lane % 4 == 0) {
      maxima[at] = state.maximum[half];
      denominators[at] = state.denominator[half];
    }
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) numerators[at * PITCH + n * 8 + column + j] = numerator[n][2 * half + j];
  }
  __syncthreads(); // the warps' states are there
  int part;
  const Parts to = find_place<HEAD_DIM, ROWS>(a, w, part);
  merge_block<HEAD_DIM, ROWS, WARPS, PITCH>(a, w, to, part, numerators, maxima, denominators);
  combine<HEAD_DIM, ROWS>(a, w, reinterpret_cast<Floats *>(shared));
}
