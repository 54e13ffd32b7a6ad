// What both attention kernels share: their arguments, who works on what, and how a block's own partials come together.
//
// A *row* is one query of one query head. The rows of a KV head, queries x group of them, are numbered
// query * group + head within the group and are taken in tiles. Block (split, kv_head + tile * kv_heads, batch) takes
// one tile over one contiguous range of tokens, a *split*. combine.cuh merges the splits, merge_splits.cu those of wide
// heads.
//
// Which tokens those are, all valid ones or what its queries may see, is a parameter of the kernels (tokens.cuh).
//
// What costs before the first token arrives is one load of the length and instructions one behind the other. So
// divisors come with their reciprocals, q is loaded once for a block, by vectors, and is waited for only after the
// first keys and values are asked for.
#pragma once
#include "finish.cuh"

enum ElementType { FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2 };

// What divides by a number that is only known at launch: see `divide`.
struct Divisor {
  unsigned multiplier, shift;
};

// max and denominator of a partial
struct alignas(8) State {
  float maximum, denominator;
};

struct TileView; // these are of tokens.cuh
struct Span;
struct QueryView;
struct TokenTables;

// treeattn/backends/cuda/attention.py has the same structures, with the same fields in the same order.

// [batch, rows, heads, head_dim], rows being queries or tokens; strides are in elements, those of q in bytes. A cache
// in pages is [pages, page_size, kv_heads, head_dim], its first stride that of pages.
struct Strided {
  const void *data;
  long long batch_stride, row_stride, head_stride;
};

// What queries see, of VisibleTokens alone. It stays in place for as long as the plan, also for captured graphs.
struct Mask {
  const TileView *tiles;        // [batch, tiles of rows]
  const Span *spans;            // those of a tile ascend
  const QueryView *views;       // [batch, queries]
  const long long *q_positions; // [batch, queries]
  const float *slopes;          // [heads] of ALiBi, or null
  const TokenTables *lookup;
};

// Of Paged tokens alone.
struct Pages {
  const int *table; // [batch, count]: which pages those of a sequence are; below 0: none
  int count, size;  // of a sequence; tokens of a page
  Divisor by_size;
};

// For the splits, as combine.cuh has it; with one split `fan` and memory are unused.
struct Scratch {
  Floats *numerators;
  State *states;
  unsigned *counters; // all 0 before and after
  int fan;            // how many splits are merged at once
  Divisor by_splits, by_fan;
};

// The lengths of so many sequences fit in the arguments.
constexpr int FEW = 16;

struct AttentionArguments {
  Strided q, k, v; // rows of k and v are aligned to 16 bytes
  Mask mask;
  Pages pages;
  Scratch scratch;
  const long long *lengths;         // [batch]: valid tokens, clamped to 0..tokens; null: `few_lengths` has them
  float *records;                   // [batch, heads, queries, head_dim + 2], written
  const float *k_scales, *v_scales; // [kv_heads], what keys and values of 8 bits are multiplied by; else unused
  int tokens, queries, heads, kv_heads, group;
  int q_type;    // ElementType
  int q_aligned; // are rows of q aligned to 16 bytes?
  Divisor by_group, by_kv_heads;
  float scale;
  float softcap, by_softcap; // and its reciprocal; 0: none
  float *out, *lse;          // as `finish` writes them, where no other records are to be merged; or null
  int few_lengths[FEW];      // of at most so many sequences; of more, where all tokens are valid, the largest numbers
};

constexpr int WARPS = 4, THREADS = 32 * WARPS; // of a block, where its kernel does not say otherwise
constexpr int MAX_SPLITS = 256;
constexpr float LOG2_E = 1.44269504088896341f;
constexpr unsigned ALL_LANES = 0xffffffffu;

constexpr int power_of_two_from(int n) {
  int power = 1;
  while (power < n) power *= 2;
  return power;
}

// n / divisor for 0 <= n < 2^31. The host gives shift = 31 + ceil(log2(divisor)) and multiplier = ceil(2^shift /
// divisor), which is exact there (Granlund and Montgomery 1994, "Division by Invariant Integers using Multiplication").
__device__ __forceinline__ int divide(int n, const Divisor &by) {
  return (int)((unsigned long long)(unsigned)n * by.multiplier >> by.shift);
}

// The block's place in the grid.
struct Work {
  int split, splits, kv_head, tile, batch;
  int rows, tile_rows; // of the KV head, and of them in this tile
};

__device__ __forceinline__ Work find_work(const AttentionArguments &a, int rows_of_tile) {
  Work w;
  w.split = blockIdx.x;
  w.splits = gridDim.x;
  w.tile = divide(blockIdx.y, a.by_kv_heads);
  w.kv_head = blockIdx.y - w.tile * a.kv_heads;
  w.batch = blockIdx.z;
  w.rows = a.queries * a.group;
  w.tile_rows = min(rows_of_tile, w.rows - w.tile * rows_of_tile);
  return w;
}

// Which query row `in_tile` of the block's tile is, and which query head. Rows that pad the tile are its first.
struct Row {
  int query, head;
};

__device__ __forceinline__ Row find_row(const AttentionArguments &a, const Work &w, int rows_of_tile, int in_tile) {
  const int row = w.tile * rows_of_tile + (in_tile < w.tile_rows ? in_tile : 0), query = divide(row, a.by_group);
  return {query, w.kv_head * a.group + row - query * a.group};
}

// Eight neighbouring elements of q as they lie in memory; the second half is of float32 only.
struct QueryPiece {
  static constexpr int ELEMENTS = 8;
  Vector half[2];

  // Element i, widened.
  __device__ __forceinline__ float element(int type, int i) const {
    if (type == FLOAT32) return __uint_as_float(half[i / 4].word[i % 4]);
    const unsigned short bits = (unsigned short)(half[0].word[i / 2] >> 16 * (i % 2));
    return type == FLOAT16 ? to_float(float16{bits}) : to_float(bfloat16{bits});
  }
};

// The piece of row `in_tile` that begins at element `index`; zeros, and nothing read, for rows that pad the tile.
__device__ __forceinline__ QueryPiece load_query(const AttentionArguments &a, const Work &w, int rows_of_tile,
                                                 int in_tile, int index) {
  QueryPiece piece{};
  if (in_tile >= w.tile_rows) return piece;
  const Row row = find_row(a, w, rows_of_tile, in_tile);
  const char *from = static_cast<const char *>(a.q.data) + w.batch * a.q.batch_stride + row.query * a.q.row_stride +
                     row.head * a.q.head_stride + index * (a.q_type == FLOAT32 ? 4 : 2);
  if (a.q_aligned) {
    piece.half[0] = reinterpret_cast<const Vector *>(from)[0];
    if (a.q_type == FLOAT32) piece.half[1] = reinterpret_cast<const Vector *>(from)[1];
  } else if (a.q_type == FLOAT32) {
#pragma unroll
    for (int i = 0; i < 8; ++i) piece.half[i / 4].word[i % 4] = reinterpret_cast<const unsigned *>(from)[i];
  } else {
    const unsigned short *bits = reinterpret_cast<const unsigned short *>(from);
#pragma unroll
    for (int i = 0; i < 4; ++i) piece.half[0].word[i] = bits[2 * i] | (unsigned)bits[2 * i + 1] << 16;
  }
  return piece;
}

// exp(x) to a few units in the last place: weights within a shard need no defined bits across machines.
__device__ __forceinline__ float weigh(float x) { return exp2_fast(x * LOG2_E); }

// The factor that brings a partial with maximum `maximum` to the larger maximum `top`.
__device__ __forceinline__ float rescale(float maximum, float top) {
  return maximum == negative_infinity() ? 0.0f : weigh(maximum - top);
}

// sum += factor * value. Factor 0 times NaN is NaN, as it should be: such a part saw a NaN score.
__device__ __forceinline__ void add_scaled(Floats &sum, float factor, const Floats &value) {
#pragma unroll
  for (int i = 0; i < 4; ++i) sum.element[i] = fmaf(factor, value.element[i], sum.element[i]);
}

// Partials of a tile's rows in scratch memory that are to be merged, [rows][count]: numerators of head_dim elements,
// and states. Without memory they stand for the records.
struct Parts {
  Floats *numerators;
  State *states;
  int count;
};

// Stores four elements of a row's partial, from `index` on, as part `part` of `to`, or in the row's record, which is
// finished where that is asked for. A NaN denominator makes all of it NaN, and a maximum of -inf makes it the identity.
template <int HEAD_DIM, int ROWS>
__device__ __forceinline__ void store_partial(const AttentionArguments &a, const Work &w, const Parts &to, int part,
                                              int in_tile, int index, const State &state, Floats value) {
  const bool invalid = state.denominator != state.denominator;
  const bool empty = !invalid && state.maximum == negative_infinity();
  const State left = {invalid ? canonical_nan() : state.maximum, invalid ? canonical_nan()
                                                                 : empty ? 0.0f
                                                                         : state.denominator};
#pragma unroll
  for (int i = 0; i < 4; ++i) value.element[i] = invalid ? canonical_nan() : empty ? 0.0f : canonical(value.element[i]);
  if (to.numerators) {
    const int at = in_tile * to.count + part;
    to.numerators[at * (HEAD_DIM / 4) + index / 4] = value;
    if (index == 0) to.states[at] = left;
    return;
  }
  const Row row = find_row(a, w, ROWS, in_tile);
  const long long number = ((long long)w.batch * a.heads + row.head) * a.queries + row.query;
  float *record = a.records + number * (HEAD_DIM + RECORD_NUMERATOR);
#pragma unroll
  for (int i = 0; i < 4; ++i) record[RECORD_NUMERATOR + index + i] = value.element[i];
  if (index == 0) {
    record[RECORD_MAX] = left.maximum;
    record[RECORD_DENOMINATOR] = left.denominator;
  }
  if (!a.out) return;
  const Quotient quotient(left.maximum, left.denominator);
  float *out = a.out + (((long long)w.batch * a.queries + row.query) * a.heads + row.head) * HEAD_DIM + index;
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = quotient.of(value.element[i]);
  if (index == 0) a.lse[number] = quotient.lse();
}

// Merges the PARTS partials of each row that the block has in shared memory, in ascending order, and stores them.
// numerators [PARTS][ROWS][PITCH], maxima and denominators [PARTS][ROWS].
template <int HEAD_DIM, int ROWS, int PARTS, int PITCH>
__device__ __forceinline__ void merge_block(const AttentionArguments &a, const Work &w, const Parts &to, int part,
                                            const float *numerators, const float *maxima, const float *denominators) {
  constexpr int COLUMNS = HEAD_DIM / 4;
  for (int e = threadIdx.x; e < w.tile_rows * COLUMNS; e += blockDim.x) {
    const int in_tile = e / COLUMNS, index = e % COLUMNS * 4;
    State state = {negative_infinity(), 0.0f};
    Floats value{};
#pragma unroll
    for (int p = 0; p < PARTS; ++p) state.maximum = fmaxf(state.maximum, maxima[p * ROWS + in_tile]);
#pragma unroll 4
    for (int p = 0; p < PARTS; ++p) {
      const float factor = rescale(maxima[p * ROWS + in_tile], state.maximum);
      state.denominator = fmaf(factor, denominators[p * ROWS + in_tile], state.denominator);
      add_scaled(value, factor, *reinterpret_cast<const Floats *>(numerators + (p * ROWS + in_tile) * PITCH + index));
    }
    store_partial<HEAD_DIM, ROWS>(a, w, to, part, in_tile, index, state, value);
  }
}
