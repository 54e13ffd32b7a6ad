// Records of more than 64 rows that share a KV head, by tensor cores: queries and a cache of one type of 16 bits.
//
// Each warp has 32 rows, two fragments, for every matrix of keys and values that it loads from shared memory: with 16
// rows these loads take as long as the products. Sums of 32 rows fill the registers, so queries stay in shared memory.
// Splits of so many rows are more than the last block merges in time: merge_splits.cu does.
#include "combine.cuh"
#include "fragments.cuh"
#include "tiles.cuh"

// A thread holds two rows of each fragment, lane / 4 and 8 more, of columns 2 (lane % 4) + 0, 1.
template <typename T, int HEAD_DIM, int TILE, int STAGES, typename Tokens = AllTokens>
__global__ void __launch_bounds__(THREADS, 2) attention_rows(const AttentionArguments a) {
  constexpr int FRAGMENTS = 2, ROWS = WARPS * FRAGMENTS * 16, EIGHTS = TILE / 8;
  constexpr int STEPS = HEAD_DIM / 16, COLUMNS = HEAD_DIM / 8;
  constexpr int PADDED = HEAD_DIM + 8, PITCH = HEAD_DIM + 8; // of tiles, and of numerators: see attention_mma.cu
  static_assert(HEAD_DIM % 16 == 0 && TILE % 16 == 0 && ROWS <= THREADS, "whole matrices, and a thread for each view");
  DYNAMIC_SHARED(unsigned char, shared);
  T *const queries = reinterpret_cast<T *>(shared);
  Stages<T, HEAD_DIM, PADDED, 2, TILE, STAGES, THREADS> stages;
  stages.first = queries + ROWS * PADDED;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = lane % 4 * 2;
  const int first_row = warp * FRAGMENTS * 16;
  const Work w = find_work(a, ROWS);
  Tokens tokens(a, w);
  tokens.template find<TILE>(a, w);
  if constexpr (Tokens::CHOSEN) {
    tokens.template load_views<ROWS>(a, w);
    __syncthreads(); // the views are there
  }
  const T *sources[2];
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    const Strided &source = s ? a.v : a.k;
    sources[s] = static_cast<const T *>(source.data) + w.kv_head * source.head_stride;
    if constexpr (!Tokens::PAGED) sources[s] += w.batch * source.batch_stride;
  }
  Tokens ahead = tokens;
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) stages.template start<ROWS>(a, ahead, sources, i);

  constexpr int PIECES = HEAD_DIM / QueryPiece::ELEMENTS;
#pragma unroll 4
  for (int e = threadIdx.x; e < ROWS * PIECES; e += THREADS) {
    const int row = e / PIECES, index = e % PIECES * QueryPiece::ELEMENTS;
    *reinterpret_cast<Vector *>(queries + row * PADDED + index) = load_query(a, w, ROWS, row, index).half[0];
  }

  // Of what a lane reads of queries and tiles, so that addresses are one base and constants.
  const T *const warp_queries = queries + (first_row + lane % 16) * PADDED + lane / 16 * 8;
  const int of_keys = (lane / 16 * 8 + lane % 8) * PADDED + lane / 8 % 2 * 8;
  const int of_values = (lane / 8 % 2 * 8 + lane % 8) * PADDED + lane / 16 * 8;
  float numerator[FRAGMENTS][COLUMNS][4] = {};
  RowPair state[FRAGMENTS];
  int stage = 0;
#pragma unroll 1
  while (tokens.at.start < tokens.at.end) {
    copy_async_wait<STAGES - 2>();
    __syncthreads(); // queries and everyone's copies of this tile are there, and nobody reads what is filled next
    const T *const tile_keys = stages.row(stage, 0, 0) + of_keys, *const tile_values =
                                                                      stages.row(stage, 1, 0) + of_values;

    float scores[FRAGMENTS][EIGHTS][4] = {};
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      unsigned q[FRAGMENTS][4];
#pragma unroll
      for (int m = 0; m < FRAGMENTS; ++m) load_matrices<false>(q[m], warp_queries + m * 16 * PADDED + step * 16);
#pragma unroll
      for (int n = 0; n < EIGHTS; n += 2) {
        unsigned keys[4];
        load_matrices<false>(keys, tile_keys + n * 8 * PADDED + step * 16);
#pragma unroll
        for (int m = 0; m < FRAGMENTS; ++m) {
          multiply_matrices(scores[m][n], q[m], keys, T{});
          multiply_matrices(scores[m][n + 1], q[m], keys + 2, T{});
        }
      }
    }
    // Not before, where the rows of its copies would find no registers.
    stages.template start<ROWS>(a, ahead, sources, stages.before(stage));
#pragma unroll
    for (int m = 0; m < FRAGMENTS; ++m) {
      const int rows[2] = {first_row + m * 16 + lane / 4, first_row + m * 16 + lane / 4 + 8};
      find_scores<TILE, ROWS>(a, tokens, tokens.at, tokens.at.start + column, rows, a.scale, scores[m]);
      float factor[2];
      state[m].online_softmax(scores[m], factor);
      rescale_numerators(numerator[m], factor);
    }
#pragma unroll
    for (int eight = 0; eight < EIGHTS; eight += 2) {
      unsigned weights[FRAGMENTS][4];
#pragma unroll
      for (int m = 0; m < FRAGMENTS; ++m) pack_weights<T>(weights[m], scores[m], eight);
#pragma unroll
      for (int n = 0; n < COLUMNS; n += 2) {
        unsigned values[4];
        load_matrices<true>(values, tile_values + eight * 8 * PADDED + n * 8);
#pragma unroll
        for (int m = 0; m < FRAGMENTS; ++m) {
          multiply_matrices(numerator[m][n], weights[m], values, T{});
          multiply_matrices(numerator[m][n + 1], weights[m], values + 2, T{});
        }
      }
    }
    tokens.template advance<TILE>(a);
    stage = stages.after(stage);
  }
  copy_async_wait<0>();
  __syncthreads(); // queries and tiles are free

  float *numerators = reinterpret_cast<float *>(shared);
  float *maxima = numerators + ROWS * PITCH, *denominators = maxima + ROWS;
#pragma unroll
  for (int m = 0; m < FRAGMENTS; ++m) {
    state[m].sum_denominators();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + m * 16 + lane / 4 + half * 8;
      if (lane % 4 == 0) {
        maxima[row] = state[m].maximum[half];
        denominators[row] = state[m].denominator[half];
      }
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) numerators[row * PITCH + n * 8 + column + j] = numerator[m][n][2 * half + j];
    }
  }
  __syncthreads(); // all rows are there
  int part;
  const Parts to = find_part<HEAD_DIM, ROWS>(a, w, part);
  merge_block<HEAD_DIM, ROWS, 1, PITCH>(a, w, to, part, numerators, maxima, denominators);
}
