// How the splits of a tile come together where they are the blocks of a cluster, from compute capability 9.0 on: such
// blocks run at once and read each other's shared memory. There is no scratch memory, nobody counts, and nothing goes
// through the second level of caches: each block leaves its partials in its own shared memory, and merges a share of
// the tile's elements out of all of them, in ascending order.
#pragma once
#include "attention.cuh"

// Blocks of a cluster, and splits: the most that every device with clusters has.
constexpr int CLUSTER = 8;

// Of a block's own partials.
template <int HEAD_DIM, int ROWS> constexpr int OWN_BYTES = ROWS * (HEAD_DIM * sizeof(float) + sizeof(State));

// They lie at `at` in its shared memory, aligned to 16 bytes.
template <int HEAD_DIM, int ROWS> __device__ __forceinline__ Parts own_parts(unsigned char *at) {
  Floats *numerators = reinterpret_cast<Floats *>(at);
  return {numerators, reinterpret_cast<State *>(numerators + ROWS * (HEAD_DIM / 4)), 1};
}

// Every thread of every block calls this after it stored its part of `own`, which lies at the same place in all blocks:
// also where a block has no tokens.
template <int HEAD_DIM, int ROWS>
__device__ __forceinline__ void combine_cluster(const AttentionArguments &a, const Work &w, const Parts &own) {
  constexpr int COLUMNS = HEAD_DIM / 4;
  const int elements = w.tile_rows * COLUMNS, share = (elements + CLUSTER - 1) / CLUSTER;
  const int begin = w.split * share, end = min(begin + share, elements);
  meet_cluster(); // all blocks' partials are there
  for (int e = begin + threadIdx.x; e < end; e += blockDim.x) {
    State states[CLUSTER];
    Floats values[CLUSTER];
#pragma unroll
    for (int block = 0; block < CLUSTER; ++block) { // all are asked for before one is waited for
      states[block] = load_of_block(own.states + e / COLUMNS, block);
      values[block] = load_of_block(own.numerators + e, block);
    }
    State state = {negative_infinity(), 0.0f};
    Floats value{};
#pragma unroll
    for (int block = 0; block < CLUSTER; ++block) state.maximum = fmaxf(state.maximum, states[block].maximum);
#pragma unroll
    for (int block = 0; block < CLUSTER; ++block) {
      const float factor = rescale(states[block].maximum, state.maximum);
      state.denominator = fmaf(factor, states[block].denominator, state.denominator);
      add_scaled(value, factor, values[block]);
    }
    store_partial<HEAD_DIM, ROWS>(a, w, {}, 0, e / COLUMNS, e % COLUMNS * 4, state, value);
  }
  meet_cluster(); // nobody reads this block's shared memory any more
}
