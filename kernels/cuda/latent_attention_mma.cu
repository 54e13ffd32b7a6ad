// Records of rows that share a latent head, by tensor cores: float16 and bfloat16.
//
// The warps of a block share the channels, not the tokens: each has a quarter of q and of the numerators in registers,
// which are too many for one warp, and reads its quarter of the keys. What it finds of the scores goes to the others
// through shared memory; all add the four parts in one order, so that all have the same weights, to the bit.
//
// Scores and sums are float32. Weights are rounded to 16 bits for their product with the values: |out - exact| can
// reach 4e-3 * max|v|; max and denominator do not see the rounding.
#include "fragments.cuh"
#include "latent_keys.cuh"

constexpr int TILE = 32, EIGHTS = TILE / 8;

// Rows of keys are padded so that the eight rows of a matrix lie in different banks of shared memory.
template <typename T, int HEAD_DIM, int V_DIM, int STAGES, typename Tokens = AllTokens>
__global__ void __launch_bounds__(THREADS) latent_attention_mma(const AttentionArguments a) {
  constexpr int KEY_PITCH = HEAD_DIM + 8, STEPS = HEAD_DIM / 16 / WARPS, COLUMNS = V_DIM / 8 / WARPS;
  constexpr int PITCH = V_DIM + 8; // of numerators, in floats: rows of one column lie in different banks
  constexpr int BYTES = STAGES * TILE * KEY_PITCH * sizeof(T);
  static_assert(HEAD_DIM % (16 * WARPS) == 0 && V_DIM % (16 * WARPS) == 0, "each warp has a whole quarter");
  static_assert(BYTES >= sizeof(float) * ROWS * (PITCH + 2), "the numerators reuse the stages");
  static_assert(BYTES >= sizeof(float) * Readers<V_DIM, ROWS>::SHARED, "so does the merge of splits");
  DYNAMIC_SHARED(T, shared);
  const KeyStages<T, HEAD_DIM, KEY_PITCH, TILE, STAGES> stages{shared};
  Floats *parts = reinterpret_cast<Floats *>(shared + STAGES * TILE * KEY_PITCH); // [warps][eights][lanes]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = lane % 4 * 2;
  const Work w = find_work(a, ROWS);
  Tokens tokens(a, w);

  constexpr int PIECES = HEAD_DIM / QueryPiece::ELEMENTS, LOADS = ROWS * PIECES / THREADS;
  static_assert(ROWS * PIECES % THREADS == 0, "as many loads for each thread");
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
  if constexpr (!Tokens::PAGED) k += w.batch * a.k_batch_stride;
  Tokens ahead = tokens;
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) stages.start(a, ahead, k, i);

  // q goes through the last stage, which the first turn of the loop fills, after a barrier of its own.
#pragma unroll
  for (int i = 0; i < LOADS; ++i) {
    const int e = i * THREADS + threadIdx.x;
    T *to = stages.row(STAGES - 1, e / PIECES) + e % PIECES * QueryPiece::ELEMENTS;
    *reinterpret_cast<Vector *>(to) = pieces[i];
  }
  __syncthreads(); // q is there
  const int first_channel = warp * STEPS * 16, first_column = warp * COLUMNS * 8;
  unsigned q[STEPS][4];
#pragma unroll
  for (int step = 0; step < STEPS; ++step)
    load_matrices<false>(q[step], stages.row(STAGES - 1, lane % 16) + first_channel + step * 16 + lane / 16 * 8);
  const int rows[2] = {lane / 4, lane / 4 + 8};

  float numerator[COLUMNS][4];
  RowPair state;
#pragma unroll
  for (int n = 0; n < COLUMNS; ++n)
#pragma unroll
    for (int j = 0; j < 4; ++j) numerator[n][j] = 0.0f;

  int stage = 0;
#pragma unroll 1
  while (tokens.at.start < tokens.at.end) {
    copy_async_wait<STAGES - 2>();
    __syncthreads(); // everyone's copies of this tile are there, and nobody reads the stage that is filled next
    stages.start(a, ahead, k, stages.before(stage));

    float scores[EIGHTS][4] = {};
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
      for (int n = 0; n < EIGHTS; n += 2) {
        unsigned keys[4];
        load_matrices<false>(keys, stages.row(stage, n * 8 + lane / 16 * 8 + lane % 8) + first_channel + step * 16 +
                                       lane / 8 % 2 * 8);
        multiply_matrices(scores[n], q[step], keys, T{});
        multiply_matrices(scores[n + 1], q[step], keys + 2, T{});
      }
#pragma unroll
    for (int n = 0; n < EIGHTS; ++n)
      parts[(warp * EIGHTS + n) * 32 + lane] = {scores[n][0], scores[n][1], scores[n][2], scores[n][3]};
    __syncthreads(); // all parts of the scores are there
#pragma unroll
    for (int n = 0; n < EIGHTS; ++n) {
      Floats sum = parts[n * 32 + lane];
#pragma unroll
      for (int i = 1; i < WARPS; ++i) add_scaled(sum, 1.0f, parts[(i * EIGHTS + n) * 32 + lane]);
#pragma unroll
      for (int j = 0; j < 4; ++j) scores[n][j] = sum.element[j];
    }
    find_scores<TILE, ROWS>(a, tokens, tokens.at, tokens.at.start + column, rows, scores);
    tokens.template advance<TILE>(a);

    float factor[2];
    state.take(scores, factor);
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) numerator[n][j] *= factor[j / 2];
#pragma unroll
    for (int eight = 0; eight < EIGHTS; eight += 2) {
      unsigned weights[4];
      pack_weights<T>(weights, scores, eight);
#pragma unroll
      for (int n = 0; n < COLUMNS; n += 2) {
        unsigned values[4];
        load_matrices<true>(values, stages.row(stage, eight * 8 + lane / 8 % 2 * 8 + lane % 8) + first_column + n * 8 +
                                        lane / 16 * 8);
        multiply_matrices(numerator[n], weights, values, T{});
        multiply_matrices(numerator[n + 1], weights, values + 2, T{});
      }
    }
    stage = stages.after(stage);
  }
  copy_async_wait<0>();
  __syncthreads(); // the stages are free

  float *numerators = reinterpret_cast<float *>(shared);
  float *maxima = numerators + ROWS * PITCH, *denominators = maxima + ROWS;
  state.sum_denominators();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (warp == 0 && lane % 4 == 0) {
      maxima[rows[half]] = state.maximum[half];
      denominators[rows[half]] = state.denominator[half];
    }
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j)
        numerators[rows[half] * PITCH + first_column + n * 8 + column + j] = numerator[n][2 * half + j];
  }
  __syncthreads(); // all columns are there
  int part;
  const Parts to = find_place<V_DIM, ROWS>(a, w, part);
  merge_block<V_DIM, ROWS, 1, PITCH>(a, w, to, part, numerators, maxima, denominators);
  combine<V_DIM, ROWS>(a, w, reinterpret_cast<Floats *>(shared));
}
