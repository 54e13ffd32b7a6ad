// How the splits of a tile come together, within the launch that made them. Those of heads of more than 256 channels
// or of many rows are more than one multiprocessor merges in time: merge_splits.cu does, in a launch of its own, by all
// of them.
//
// Splits are numbered in groups of `fan`. A block stores its partials among those of its group and counts itself; the
// last one of a group merges the group, and where there are several groups the last of these merges them. Each merge
// is of all parts in a fixed order, so the bits do not depend on which block came last, nor on when.
//
// What a merge waits for is memory: the count, then all states and the first numerators, which are asked for at
// once. Numerators lie row behind row, part behind part; the block's threads form readers, each of which takes every
// `stride`-th part whole, rows on end, two batches ahead. The readers' sums meet in shared memory.
//
// Scratch memory of a tile, in partials: [groups][rows][splits of the group], then [rows][groups]; its counters: one
// for each group, then one for the groups.
#pragma once
#include "attention.cuh"

// At most so many partials, rows x parts, are merged at once: treeattn/backends/cuda/splits.py keeps to it.
constexpr int MAX_PARTIALS = 1024;

template <int HEAD_DIM> constexpr bool MERGED_APART = HEAD_DIM > 256;

// Rows of a tile are merged 16 at a time, CHANNELS of them, by THREADS_OF_BLOCK; a reader asks for BATCH parts at a
// time: each batch is a trip to the second level of caches and back, and a tile of 16 splits is one or two.
template <int CHANNELS, int TILE_ROWS, int THREADS_OF_BLOCK = THREADS> struct Readers {
  static constexpr int ROWS = TILE_ROWS < 16 ? TILE_ROWS : 16, BATCH = 8, BLOCK = THREADS_OF_BLOCK;
  static constexpr int COLUMNS = CHANNELS / 4;
  static constexpr int LANES = power_of_two_from(COLUMNS); // head_dim 80 and 96 leave some idle
  static constexpr int COUNT = BLOCK / LANES;
  static constexpr int PARTIALS = ROWS * MAX_SPLITS < MAX_PARTIALS ? ROWS * MAX_SPLITS : MAX_PARTIALS;
  static constexpr int SUMS = COUNT * ROWS * CHANNELS;
  static constexpr int SHARED = PARTIALS + (SUMS > PARTIALS ? SUMS : PARTIALS); // floats that `combine` needs
};

struct Group {
  int number, count; // of the groups
  int first;         // split
};

__device__ __forceinline__ Group find_group(const AttentionArguments &a, const Work &w) {
  Group g;
  g.number = divide(w.split, a.scratch.by_fan);
  g.count = divide(w.splits + a.scratch.fan - 1, a.scratch.by_fan);
  g.first = g.number * a.scratch.fan;
  return g;
}

__device__ __forceinline__ long long tile_number(const Work &w) { return (long long)w.batch * gridDim.y + blockIdx.y; }

// The partials of the block's group of splits, or those of all groups.
template <int HEAD_DIM, int ROWS>
__device__ __forceinline__ Parts find_parts(const AttentionArguments &a, const Work &w, const Group &g, bool groups) {
  const int pitch = min(ROWS, w.rows);
  const long long first = (tile_number(w) * (w.splits + g.count) + (groups ? w.splits : g.first)) * pitch;
  return {a.scratch.numerators + first * (HEAD_DIM / 4), a.scratch.states + first,
          groups ? g.count : min(a.scratch.fan, w.splits - g.first)};
}

// Where a block stores the partials of its split, and which part of it they are.
template <int HEAD_DIM, int ROWS>
__device__ __forceinline__ Parts find_part(const AttentionArguments &a, const Work &w, int &part) {
  part = 0;
  if (w.splits == 1) return {};
  const Group g = find_group(a, w);
  part = w.split - g.first;
  return find_parts<HEAD_DIM, ROWS>(a, w, g, false);
}

// Whether all `count` blocks have come, this one as the last: what they left can then be read.
__device__ __forceinline__ bool is_last(unsigned *counter, int count) {
  __shared__ bool last;
  __syncthreads(); // all of the block's partials are written
  if (threadIdx.x == 0) {
    last = add_ordered(counter, 1u) == (unsigned)count - 1u;
    if (last) *counter = 0u; // ready for the next launch
  }
  __syncthreads(); // the verdict is there
  return last;
}

// The parts `first`, `first` + stride, .. of those that a reader takes; nothing is read from `end` on.
template <int PITCH, int BATCH>
__device__ __forceinline__ void load_parts(Floats (&to)[BATCH], const Floats *column, int first, int stride, int end) {
#pragma unroll
  for (int u = 0; u < BATCH; ++u) {
    const int at = first + u * stride;
    if (at < end) to[u] = load_fresh(column + at * PITCH);
  }
}

// Turns the maxima of all parts, [rows][count] in shared memory, into their weights, and adds up what they weigh.
template <int ROWS, int BLOCK>
__device__ __forceinline__ void weigh_parts(int rows, int count, float *maxima, const float *denominators,
                                            State *merged) {
  constexpr int LANES = BLOCK / ROWS < 32 ? BLOCK / ROWS : 32; // of a row: all rows are weighed at once
  const int row = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  const int begin = row * count, end = row < rows ? begin + count : begin;
  State state = {negative_infinity(), 0.0f};
  for (int i = begin + lane; i < end; i += LANES) state.maximum = fmaxf(state.maximum, maxima[i]);
#pragma unroll
  for (int distance = LANES / 2; distance > 0; distance /= 2)
    state.maximum = fmaxf(state.maximum, __shfl_xor_sync(ALL_LANES, state.maximum, distance));
  for (int i = begin + lane; i < end; i += LANES) {
    maxima[i] = rescale(maxima[i], state.maximum);
    state.denominator = fmaf(maxima[i], denominators[i], state.denominator);
  }
#pragma unroll
  for (int distance = LANES / 2; distance > 0; distance /= 2)
    state.denominator += __shfl_xor_sync(ALL_LANES, state.denominator, distance);
  if (lane == 0 && row < rows) merged[row] = state;
}

// Merges the parts of the rows of the tile from `first_row` on, the columns of R from `first_column` on, and stores
// them as part `part` of `to`.
template <int HEAD_DIM, int TILE_ROWS, typename R>
__device__ __forceinline__ void merge_parts(const AttentionArguments &a, const Work &w, const Parts &from,
                                            const Parts &to, int part, int first_row, int first_column,
                                            Floats *shared) {
  constexpr int ROWS = R::ROWS, PITCH = HEAD_DIM / 4, BATCH = R::BATCH, BLOCK = R::BLOCK;
  constexpr int STATES = R::PARTIALS / BLOCK;
  const int rows = min(ROWS, w.tile_rows - first_row), first_part = first_row * from.count;
  __shared__ State merged[ROWS];
  float *weights = reinterpret_cast<float *>(shared), *denominators = weights + R::PARTIALS;
  Floats *sums = reinterpret_cast<Floats *>(denominators); // [readers][rows][columns], once denominators are summed
  const int partials = rows * from.count, stride = min(R::COUNT, from.count);
  const int reader = threadIdx.x / R::LANES, column = threadIdx.x % R::LANES;
  const bool reads = reader < stride && column < R::COLUMNS;

  State states[STATES] = {};
#pragma unroll
  for (int i = 0; i < STATES; ++i)
    if (i * BLOCK + (int)threadIdx.x < partials)
      states[i] = load_fresh(from.states + first_part + i * BLOCK + threadIdx.x);
  Floats batch[BATCH] = {};
  const Floats *numerators = from.numerators + first_part * PITCH + first_column + column;
  const int end = reads ? partials : 0;
  load_parts<PITCH>(batch, numerators, reader, stride, end);
#pragma unroll
  for (int i = 0; i < STATES; ++i) {
    const int at = i * BLOCK + threadIdx.x;
    if (at >= partials) break;
    weights[at] = states[i].maximum;
    denominators[at] = states[i].denominator;
  }
  __syncthreads(); // all states are there
  weigh_parts<ROWS, BLOCK>(rows, from.count, weights, denominators, merged);
  __syncthreads(); // all weights are there, and nobody reads denominators any more

  int row = 0, row_end = from.count;
  Floats sum{};
  for (int first = reader; first < end; first += BATCH * stride) {
    Floats next[BATCH] = {};
    load_parts<PITCH>(next, numerators, first + BATCH * stride, stride, end);
#pragma unroll
    for (int u = 0; u < BATCH; ++u) {
      const int at = first + u * stride;
      if (at >= end) break;
      if (at >= row_end) { // by less than a row: there are at least `stride` parts
        sums[(reader * ROWS + row) * R::COLUMNS + column] = sum;
        sum = Floats{};
        row += 1;
        row_end += from.count;
      }
      add_scaled(sum, weights[at], batch[u]);
    }
#pragma unroll
    for (int u = 0; u < BATCH; ++u) batch[u] = next[u];
  }
  if (reads) sums[(reader * ROWS + row) * R::COLUMNS + column] = sum;
  __syncthreads(); // all sums are there
  for (int e = threadIdx.x; e < rows * R::COLUMNS; e += BLOCK) {
    const int in_pass = e / R::COLUMNS, index = (first_column + e % R::COLUMNS) * 4;
    Floats value = sums[e];
    for (int i = 1; i < stride; ++i) add_scaled(value, 1.0f, sums[i * ROWS * R::COLUMNS + e]);
    store_partial<HEAD_DIM, TILE_ROWS>(a, w, to, part, first_row + in_pass, index, merged[in_pass], value);
  }
}

// Every thread of every block calls this after it stored its partials at `find_part`.
// `shared`: Readers::SHARED floats of shared memory, which all threads have done with.
template <int HEAD_DIM, int ROWS, int BLOCK = THREADS>
__device__ __forceinline__ void combine(const AttentionArguments &a, const Work &w, Floats *shared) {
  if (MERGED_APART<HEAD_DIM> || w.splits == 1) return;
  using R = Readers<HEAD_DIM, ROWS, BLOCK>;
  const Group g = find_group(a, w);
  unsigned *counters = a.scratch.counters + tile_number(w) * (g.count + 1);
  Parts from = find_parts<HEAD_DIM, ROWS>(a, w, g, false);
  bool groups = g.count == 1; // the one group is all there is
  unsigned *counter = counters + g.number;
#pragma unroll 1
  while (is_last(counter, from.count)) {
    const Parts to = groups ? Parts{} : find_parts<HEAD_DIM, ROWS>(a, w, g, true);
    merge_parts<HEAD_DIM, ROWS, R>(a, w, from, to, g.number, 0, 0, shared);
#pragma unroll 1
    for (int row = 16; ROWS > 16 && row < w.tile_rows; row += 16) {
      __syncthreads(); // the sums of the rows before are stored
      merge_parts<HEAD_DIM, ROWS, R>(a, w, from, to, g.number, row, 0, shared);
    }
    if (groups) return;
    from = to;
    counter = counters + g.count;
    groups = true;
  }
}
