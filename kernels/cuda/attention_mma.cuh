// Records of many rows that share a KV head, by tensor cores: queries of float16 and bfloat16, caches of the same type
// or of 8 bits. What a block does, for attention_mma.cu, whose splits meet in memory, and for attention_cluster.cu,
// whose splits are the blocks of a cluster.
//
// The warps of a block are a grid, ROWS x TOKENS x CHANNELS: each has 16 rows, a part of a tile's tokens, and a part of
// the channels in registers. Few rows share out the tokens, <1, 4, 1>, whose partials meet at the end; many rows need
// no such meeting, <4, 1, 1>. Channels are shared out where one warp's registers do not hold them all, as those of
// latent heads, <1, 1, 4> or, by 8 warps, <4, 1, 2>: then a warp finds a part of each score, all parts meet in shared
// memory, and all warps add them in one order, so that all have the same weights, to the bit.
//
// Latent attention: all query heads share one head of keys, whose first channels are the values too (DeepSeek-V2,
// arXiv 2405.04434: keys of 576, values of 512). A key is brought once, for scores and sums alike.
//
// Scores and sums are float32. Weights are rounded to 16 bits for their product with the values: |out - exact| can
// reach 4e-3 * max|v|; max and denominator do not see the rounding. Numbers of 8 bits are exact in 16.
#pragma once
#include "cluster.cuh"
#include "combine.cuh"
#include "fragments.cuh"
#include "tiles.cuh"

template <int ROW_WARPS, int TOKEN_WARPS, int CHANNEL_WARPS> struct Warps {
  static constexpr int ROWS = ROW_WARPS, TOKENS = TOKEN_WARPS, CHANNELS = CHANNEL_WARPS;
  static constexpr int COUNT = ROWS * TOKENS * CHANNELS, THREADS = 32 * COUNT; // of a block
};

// A thread holds two rows of every fragment, lane / 4 and 8 more; `half` 0 and 1. Columns 2 (lane % 4) + 0, 1.
template <typename T, typename Cache, int HEAD_DIM, int V_DIM, typename Shape, int TILE, int STAGES, typename Tokens,
          bool CLUSTERED>
__device__ __forceinline__ void attend_tile(const AttentionArguments &a) {
  constexpr bool NARROW = sizeof(Cache) == 1; // brought as it is, then widened into one tile
  constexpr int ROWS = 16 * Shape::ROWS, TOKENS = TILE / Shape::TOKENS, EIGHTS = TOKENS / 8;
  constexpr int STEPS = HEAD_DIM / 16 / Shape::CHANNELS, COLUMNS = V_DIM / 8 / Shape::CHANNELS;
  constexpr int SOURCES = V_DIM == HEAD_DIM ? 2 : 1;
  // Rows are padded so that the eight rows of a matrix lie in different banks of shared memory, and so do the rows of
  // one column of the numerators, in floats.
  constexpr int PADDED = HEAD_DIM + 8, PITCH = V_DIM + 8;
  constexpr int TILES = NARROW ? 1 : STAGES, TILE_BYTES = SOURCES * TILE * PADDED * sizeof(T);
  constexpr int NARROW_BYTES = NARROW ? STAGES * SOURCES * TILE * HEAD_DIM : 0;
  constexpr int SUM_BYTES = sizeof(float) * Shape::TOKENS * ROWS * (PITCH + 2); // of partials: they reuse the tiles
  constexpr int IN_TILES = NARROW_BYTES + TILES * TILE_BYTES, BYTES = IN_TILES > SUM_BYTES ? IN_TILES : SUM_BYTES;
  constexpr int PART_BYTES = Shape::CHANNELS > 1 ? sizeof(Floats) * Shape::COUNT * EIGHTS * 32 : 0;
  static_assert(HEAD_DIM % (16 * Shape::CHANNELS) == 0 && V_DIM % (16 * Shape::CHANNELS) == 0 && TOKENS % 16 == 0,
                "each warp has whole matrices");
  static_assert(BYTES + PART_BYTES - IN_TILES + TILE_BYTES >= ROWS * PADDED * sizeof(T), "q goes through a tile");
  static_assert(BYTES >= sizeof(float) * Readers<V_DIM, ROWS, Shape::THREADS>::SHARED,
                "the merge of splits reuses the tiles");
  static_assert(!CLUSTERED || SUM_BYTES + OWN_BYTES<V_DIM, ROWS> <= BYTES,
                "the block's partials lie behind its warps'");
  DYNAMIC_SHARED(unsigned char, shared);
  const Tiles<T, PADDED, SOURCES, TILE> tiles{reinterpret_cast<T *>(shared + NARROW_BYTES)};
  Stages<Cache, HEAD_DIM, NARROW ? HEAD_DIM : PADDED, SOURCES, TILE, STAGES, Shape::THREADS> stages;
  stages.first = reinterpret_cast<Cache *>(shared);
  // Few tokens of a warp are one chain of products for each score: two, half as long, wait less. Copies are started
  // between the products, where nobody asks which tokens are seen or where they lie: these leave the time for it.
  constexpr int TURNS = decltype(stages)::TURNS, CHAINS = EIGHTS <= 2 && STEPS % 2 == 0 ? 2 : 1;
  constexpr bool BETWEEN = EIGHTS <= 2 && !NARROW && !Tokens::CHOSEN && !Tokens::PAGED && Shape::CHANNELS == 1 &&
                           decltype(stages)::VECTORS <= decltype(stages)::LANES;
  Floats *parts = reinterpret_cast<Floats *>(shared + BYTES); // of scores: [warps][eights][lanes]

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = lane % 4 * 2;
  const int channels = warp % Shape::CHANNELS; // which of them are the warp's, and which tokens and rows
  const int first_token = warp / Shape::CHANNELS % Shape::TOKENS * TOKENS;
  const int first_row = warp / (Shape::CHANNELS * Shape::TOKENS) * 16;
  const int rows[2] = {first_row + lane / 4, first_row + lane / 4 + 8};
  const Work w = find_work(a, ROWS);
  Tokens tokens(a, w);

  constexpr int PIECES = HEAD_DIM / QueryPiece::ELEMENTS, THREADS = Shape::THREADS;
  constexpr int LOADS = (ROWS * PIECES + THREADS - 1) / THREADS;
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
  const Cache *sources[SOURCES];
#pragma unroll
  for (int s = 0; s < SOURCES; ++s) {
    const Strided &source = s ? a.v : a.k;
    sources[s] = static_cast<const Cache *>(source.data) + w.kv_head * source.head_stride;
    if constexpr (!Tokens::PAGED) sources[s] += w.batch * source.batch_stride;
  }
  Tokens ahead = tokens;
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) stages.template start<ROWS>(a, ahead, sources, i);

  // q goes through the last tile, and what is free behind it, which the first turn of the loop fills, after a barrier
  // of its own.
#pragma unroll
  for (int i = 0; i < LOADS; ++i) {
    const int e = i * THREADS + threadIdx.x;
    if (e >= ROWS * PIECES) break;
    T *to = tiles.row(TILES - 1, 0, e / PIECES) + e % PIECES * QueryPiece::ELEMENTS;
    *reinterpret_cast<Vector *>(to) = pieces[i];
  }
  __syncthreads(); // q is there
  const int first_channel = channels * STEPS * 16, first_column = channels * COLUMNS * 8;
  unsigned q[STEPS][4];
#pragma unroll
  for (int step = 0; step < STEPS; ++step)
    load_matrices<false>(q[step],
                         tiles.row(TILES - 1, 0, first_row + lane % 16) + first_channel + step * 16 + lane / 16 * 8);
  float scale = a.scale;
  if constexpr (NARROW) scale *= UNIT<Cache> * a.k_scales[w.kv_head];

  float numerator[COLUMNS][4];
  RowPair state;
#pragma unroll
  for (int n = 0; n < COLUMNS; ++n)
#pragma unroll
    for (int j = 0; j < 4; ++j) numerator[n][j] = 0.0f;

  // Of what a lane reads of a tile, so that addresses are one base and constants.
  const int of_keys = (first_token + lane / 16 * 8 + lane % 8) * PADDED + first_channel + lane / 8 % 2 * 8;
  const int of_values = (first_token + lane / 8 % 2 * 8 + lane % 8) * PADDED + first_column + lane / 16 * 8;
  int stage = 0;
#pragma unroll 1
  while (tokens.at.start < tokens.at.end) {
    copy_async_wait<STAGES - 2>();
    __syncthreads(); // everyone's copies of this tile are there, and nobody reads the tile that is filled next
    const TileRange next = ahead.at;
    const Cache *rows_ahead[SOURCES];
    if constexpr (BETWEEN) {
      stages.find_rows(a, next, sources, rows_ahead);
      if (next.start < next.end) ahead.template advance<TILE>(a);
    } else {
      stages.template start<ROWS>(a, ahead, sources, stages.before(stage));
    }
    const int tile = NARROW ? 0 : stage;
    if constexpr (NARROW) {
      stages.widen(stage, tiles);
      __syncthreads(); // the tile is widened
    }
    const T *const tile_keys = tiles.row(tile, 0, 0) + of_keys;
    const T *const tile_values = tiles.row(tile, SOURCES - 1, 0) + of_values;

    float scores[EIGHTS][4] = {}, chain[EIGHTS][4] = {}; // the second one
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      float (&sums)[EIGHTS][4] = step % CHAINS ? chain : scores;
#pragma unroll
      for (int n = 0; n < EIGHTS; n += 2) {
        unsigned keys[4];
        load_matrices<false>(keys, tile_keys + n * 8 * PADDED + step * 16);
        multiply_matrices(sums[n], q[step], keys, T{});
        multiply_matrices(sums[n + 1], q[step], keys + 2, T{});
      }
      if constexpr (BETWEEN) {
#pragma unroll
        for (int turn = step * TURNS / STEPS; turn < (step + 1) * TURNS / STEPS; ++turn)
          stages.copy_turn(a, next, rows_ahead, stages.before(stage), turn);
      }
    }
    if constexpr (BETWEEN) copy_async_commit();
    if constexpr (CHAINS > 1) {
#pragma unroll
      for (int e = 0; e < 4 * EIGHTS; ++e) scores[e / 4][e % 4] += chain[e / 4][e % 4];
    }
    if constexpr (Shape::CHANNELS > 1) {
#pragma unroll
      for (int n = 0; n < EIGHTS; ++n)
        parts[(warp * EIGHTS + n) * 32 + lane] = {scores[n][0], scores[n][1], scores[n][2], scores[n][3]};
      __syncthreads(); // all parts of the scores are there
#pragma unroll
      for (int n = 0; n < EIGHTS; ++n) {
        const Floats *part = parts + ((warp - channels) * EIGHTS + n) * 32 + lane;
        Floats sum = *part;
#pragma unroll
        for (int i = 1; i < Shape::CHANNELS; ++i) add_scaled(sum, 1.0f, part[i * EIGHTS * 32]);
#pragma unroll
        for (int j = 0; j < 4; ++j) scores[n][j] = sum.element[j];
      }
    }
    const int token = tokens.at.start + first_token + column;
    find_scores<TILE, ROWS>(a, tokens, tokens.at, token, rows, scale, scores);
    tokens.template advance<TILE>(a);

    float factor[2];
    state.online_softmax(scores, factor);
    rescale_numerators(numerator, factor);
#pragma unroll
    for (int eight = 0; eight < EIGHTS; eight += 2) {
      unsigned weights[4];
      pack_weights<T>(weights, scores, eight);
#pragma unroll
      for (int n = 0; n < COLUMNS; n += 2) {
        unsigned values[4];
        load_matrices<true>(values, tile_values + eight * 8 * PADDED + n * 8);
        multiply_matrices(numerator[n], weights, values, T{});
        multiply_matrices(numerator[n + 1], weights, values + 2, T{});
      }
    }
    stage = stages.after(stage);
  }
  copy_async_wait<0>();
  __syncthreads(); // the tiles are free

  float *numerators = reinterpret_cast<float *>(shared);
  float *maxima = numerators + Shape::TOKENS * ROWS * PITCH, *denominators = maxima + Shape::TOKENS * ROWS;
  float unit = 1.0f;
  if constexpr (NARROW) unit = UNIT<Cache> * a.v_scales[w.kv_head];
  state.sum_denominators();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int at = first_token / TOKENS * ROWS + rows[half];
    if (channels == 0 && lane % 4 == 0) {
      maxima[at] = state.maximum[half];
      denominators[at] = state.denominator[half];
    }
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j)
        numerators[at * PITCH + first_column + n * 8 + column + j] = numerator[n][2 * half + j] * unit;
  }
  __syncthreads(); // the warps' partials are there
  if constexpr (CLUSTERED) {
    const Parts own = own_parts<V_DIM, ROWS>(shared + SUM_BYTES);
    merge_block<V_DIM, ROWS, Shape::TOKENS, PITCH>(a, w, own, 0, numerators, maxima, denominators);
    combine_cluster<V_DIM, ROWS>(a, w, own);
  } else {
    int part;
    const Parts to = find_part<V_DIM, ROWS>(a, w, part);
    merge_block<V_DIM, ROWS, Shape::TOKENS, PITCH>(a, w, to, part, numerators, maxima, denominators);
    combine<V_DIM, ROWS, Shape::THREADS>(a, w, reinterpret_cast<Floats *>(shared));
  }
}
