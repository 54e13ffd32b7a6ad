// What both attention kernels share: their arguments, who works on what, and how splits come together.
//
// A *row* is one query of one query head. The rows of a KV head, queries x group of them, are numbered
// query * group + head within the group and are taken in tiles. Block (split, kv_head + tile * kv_heads, batch) takes
// one tile over one contiguous range of tokens, a *split*. The last block of a tile to finish merges the splits in
// ascending order, so the bits do not depend on which one that is.
#pragma once
#include "state.cuh"

enum ElementType { FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2 };

// treeattn/backends/cuda.py has the same fields in the same order. Strides are in elements.
struct AttentionArguments {
  const void *q;                  // [batch, queries, heads, head_dim]
  const void *k, *v;              // [batch, tokens, kv_heads, head_dim], rows of head_dim aligned to 16 bytes
  const long long *lengths;       // [batch]: valid tokens, clamped to 0..tokens; null: all are
  const unsigned long long *mask; // [batch, queries, mask_words], bits over the last mask_tokens valid tokens; or null
  float *records;                 // [batch, heads, queries, head_dim + 2], written
  float *split_records;           // [batch, heads, queries, splits, head_dim + 2], scratch; unused with one split
  unsigned *counters;             // one for each tile, all 0 before and after
  long long q_batch_stride, q_query_stride, q_head_stride;
  long long k_batch_stride, k_token_stride, k_head_stride;
  long long v_batch_stride, v_token_stride, v_head_stride;
  long long mask_batch_stride;
  int tokens, queries, heads, kv_heads, mask_words, mask_tokens;
  int q_type; // ElementType
  float scale;
};

constexpr int WARPS = 4, THREADS = 32 * WARPS;
constexpr int MAX_SPLITS = 256;
constexpr float LOG2_E = 1.44269504088896341f;
constexpr unsigned ALL_LANES = 0xffffffffu;

// The block's place in the grid, and its tokens begin..end.
struct Work {
  int split, splits, kv_head, tile, batch, group, rows;
  int length, begin, end;
};

// `step`: how many tokens a block takes at a time; splits are whole numbers of steps, but for the last.
__device__ __forceinline__ Work find_work(const AttentionArguments &a, int step) {
  Work w;
  w.split = blockIdx.x;
  w.splits = gridDim.x;
  w.kv_head = blockIdx.y % a.kv_heads;
  w.tile = blockIdx.y / a.kv_heads;
  w.batch = blockIdx.z;
  w.group = a.heads / a.kv_heads;
  w.rows = a.queries * w.group;
  // Read from the device's memory at every launch: a captured graph follows a growing cache.
  const long long length = a.lengths ? a.lengths[w.batch] : a.tokens;
  w.length = (int)(length < 0 ? 0 : length > a.tokens ? a.tokens : length);
  const int steps = (w.length + step - 1) / step, chunk = (steps + w.splits - 1) / w.splits * step;
  const long long begin = (long long)w.split * chunk;
  w.begin = (int)(begin < w.length ? begin : w.length);
  w.end = w.length - w.begin > chunk ? w.begin + chunk : w.length;
  return w;
}

// May query `query` see token `token`, which is before w.length? The mask speaks of the draft tokens at the end.
__device__ __forceinline__ bool visible(const AttentionArguments &a, const Work &w, int query, int token) {
  const int bit = token - (w.length - a.mask_tokens);
  if (bit < 0) return true;
  const unsigned long long *row = a.mask + w.batch * a.mask_batch_stride + (long long)query * a.mask_words;
  return row[bit / 64] >> (bit % 64) & 1;
}

// Which record row `row` of the block's KV head is.
__device__ __forceinline__ long long record_of(const AttentionArguments &a, const Work &w, int row) {
  const int head = w.kv_head * w.group + row % w.group, query = row / w.group;
  return ((long long)w.batch * a.heads + head) * a.queries + query;
}

// Element `index` of q for a row, widened.
__device__ __forceinline__ float load_query(const AttentionArguments &a, const Work &w, int row, int index) {
  const int head = w.kv_head * w.group + row % w.group, query = row / w.group;
  const long long at = w.batch * a.q_batch_stride + query * a.q_query_stride + head * a.q_head_stride + index;
  if (a.q_type == FLOAT32) return static_cast<const float *>(a.q)[at];
  if (a.q_type == FLOAT16) return to_float(static_cast<const float16 *>(a.q)[at]);
  return to_float(static_cast<const bfloat16 *>(a.q)[at]);
}

// exp(x) to a few units in the last place: weights within a shard need no defined bits across machines.
__device__ __forceinline__ float weigh(float x) { return exp2_fast(x * LOG2_E); }

// The factor that brings a partial with maximum `maximum` to the larger maximum `top`.
__device__ __forceinline__ float rescale(float maximum, float top) {
  return maximum == negative_infinity() ? 0.0f : weigh(maximum - top);
}

// The largest of a warp's values, NaN ignored: a NaN score makes the denominator NaN, and that is enough.
__device__ __forceinline__ float largest_of_warp(float value) {
  for (int distance = 16; distance > 0; distance /= 2)
    value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, distance));
  return value;
}

__device__ __forceinline__ float sum_of_warp(float value) {
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(ALL_LANES, value, distance);
  return value;
}

// A NaN denominator makes all of the record NaN, and a maximum of -inf makes it the identity.
__device__ __forceinline__ void write_numerator(float *record, float top, float denominator, int index, float value) {
  const bool invalid = denominator != denominator;
  const bool empty = !invalid && top == negative_infinity();
  record[RECORD_NUMERATOR + index] = invalid ? canonical_nan() : empty ? 0.0f : canonical(value);
}

__device__ __forceinline__ void write_state(float *record, float top, float denominator) {
  const bool invalid = denominator != denominator;
  record[RECORD_MAX] = invalid ? canonical_nan() : top;
  record[RECORD_DENOMINATOR] = invalid ? canonical_nan() : top == negative_infinity() ? 0.0f : denominator;
}

// Where a block leaves the record of a row: among the splits, or at its destination when there is one split.
__device__ __forceinline__ float *destination(const AttentionArguments &a, const Work &w, int row, int width) {
  const long long record = record_of(a, w, row);
  if (w.splits == 1) return a.records + record * width;
  return a.split_records + (record * w.splits + w.split) * width;
}

// Merges `parts` partials of each row that lie in shared memory, in ascending order, and leaves the record.
// numerators [parts][rows][head_dim], maxima and denominators [parts][rows].
template <int HEAD_DIM, int ROWS, int PARTS>
__device__ __forceinline__ void merge_block(const AttentionArguments &a, const Work &w, const float *numerators,
                                            const float *maxima, const float *denominators) {
  for (int e = threadIdx.x; e < ROWS * HEAD_DIM; e += THREADS) {
    const int in_tile = e / HEAD_DIM, index = e % HEAD_DIM, row = w.tile * ROWS + in_tile;
    if (row >= w.rows) continue;
    float top = negative_infinity(), denominator = 0.0f, value = 0.0f;
    for (int part = 0; part < PARTS; ++part) top = fmaxf(top, maxima[part * ROWS + in_tile]);
    for (int part = 0; part < PARTS; ++part) {
      const float factor = rescale(maxima[part * ROWS + in_tile], top);
      // Factor 0 times NaN is NaN, as it should be: such a part saw a NaN score.
      denominator = fmaf(factor, denominators[part * ROWS + in_tile], denominator);
      value = fmaf(factor, numerators[(part * ROWS + in_tile) * HEAD_DIM + index], value);
    }
    float *record = destination(a, w, row, HEAD_DIM + RECORD_NUMERATOR);
    write_numerator(record, top, denominator, index, value);
    if (index == 0) write_state(record, top, denominator);
  }
}

// Every thread of every block calls this after merge_block. The last block of the tile merges the splits.
// `weights`: ROWS * MAX_SPLITS floats of shared memory that nobody uses any more.
template <int HEAD_DIM, int ROWS>
__device__ __forceinline__ void combine_splits(const AttentionArguments &a, const Work &w, float *weights) {
  constexpr int WIDTH = HEAD_DIM + RECORD_NUMERATOR;
  __shared__ unsigned is_last;
  __shared__ float tops[ROWS], sums[ROWS];
  if (w.splits == 1) return;
  __threadfence(); // this thread's part of the record is there before the count says so
  __syncthreads();
  unsigned *counter = a.counters + (long long)w.batch * gridDim.y + blockIdx.y;
  if (threadIdx.x == 0) is_last = atomicAdd(counter, 1u) == (unsigned)w.splits - 1u;
  __syncthreads();
  if (!is_last) return;
  __threadfence();

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = warp; i < ROWS && w.tile * ROWS + i < w.rows; i += WARPS) {
    const float *first = a.split_records + record_of(a, w, w.tile * ROWS + i) * w.splits * WIDTH;
    float top = negative_infinity(), sum = 0.0f;
    for (int s = lane; s < w.splits; s += 32) top = fmaxf(top, __ldcg(first + (long long)s * WIDTH + RECORD_MAX));
    top = largest_of_warp(top);
    for (int s = lane; s < w.splits; s += 32) {
      const float *record = first + (long long)s * WIDTH;
      const float factor = rescale(__ldcg(record + RECORD_MAX), top);
      weights[i * MAX_SPLITS + s] = factor;
      sum = fmaf(factor, __ldcg(record + RECORD_DENOMINATOR), sum);
    }
    sum = sum_of_warp(sum);
    if (lane == 0) {
      tops[i] = top;
      sums[i] = sum;
    }
  }
  __syncthreads();
  for (int e = threadIdx.x; e < ROWS * HEAD_DIM; e += THREADS) {
    const int in_tile = e / HEAD_DIM, index = e % HEAD_DIM, row = w.tile * ROWS + in_tile;
    if (row >= w.rows) break;
    const long long record = record_of(a, w, row);
    const float *from = a.split_records + record * w.splits * WIDTH + RECORD_NUMERATOR + index;
    float value = 0.0f;
#pragma unroll 8
    for (int s = 0; s < w.splits; ++s)
      value = fmaf(weights[in_tile * MAX_SPLITS + s], __ldcg(from + (long long)s * WIDTH), value);
    write_numerator(a.records + record * WIDTH, tops[in_tile], sums[in_tile], index, value);
    if (index == 0) write_state(a.records + record * WIDTH, tops[in_tile], sums[in_tile]);
  }
  if (threadIdx.x == 0) *counter = 0u; // ready for the next launch
}
