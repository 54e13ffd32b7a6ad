// Merges the splits of wide heads and of many rows, behind the launch that made them: a block takes CHANNELS of one row
// of a tile, so that all multiprocessors read. Blocks (row * slices + slice, kv_head + tile * kv_heads, batch); for
// rows that a tile lacks there is nothing to merge.
#include "combine.cuh"

template <int HEAD_DIM, int TILE_ROWS, int CHANNELS>
__global__ void __launch_bounds__(THREADS) merge_splits(const AttentionArguments a) {
  using R = Readers<CHANNELS, 1>;
  static_assert(HEAD_DIM % CHANNELS == 0, "whole slices");
  __shared__ Floats shared[R::SHARED / 4];
  Work w = find_work(a, TILE_ROWS);
  const int row = blockIdx.x / (HEAD_DIM / CHANNELS), slice = blockIdx.x % (HEAD_DIM / CHANNELS);
  w.splits = a.scratch.fan; // all are one group
  const Parts from = find_parts<HEAD_DIM, TILE_ROWS>(a, w, {0, 1, 0}, false);
  merge_parts<HEAD_DIM, TILE_ROWS, R>(a, w, from, {}, 0, row, slice * R::COLUMNS, shared);
}
