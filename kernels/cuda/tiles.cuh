// Tiles of tokens on their way into shared memory, for the tensor-core kernel: of keys, and of values where these are
// not the keys' first channels.
#pragma once
#include "tokens.cuh"

// TILE tokens of SOURCES arrays for each stage, rows of PITCH elements.
template <typename T, int PITCH, int SOURCES, int TILE> struct Tiles {
  T *first;

  __device__ __forceinline__ T *row(int stage, int source, int token) const {
    return first + ((stage * SOURCES + source) * TILE + token) * PITCH;
  }
};

// STAGES tiles as the cache has them, brought by asynchronous copies of all BLOCK threads.
template <typename T, int HEAD_DIM, int PITCH, int SOURCES, int TILE, int STAGES, int BLOCK>
struct Stages : Tiles<T, PITCH, SOURCES, TILE> {
  static constexpr int ELEMENTS = 16 / sizeof(T), VECTORS = HEAD_DIM / ELEMENTS; // of a vector, of a row
  // Neighbouring threads copy a row together, some of them nothing: what a row costs is found once for all its vectors.
  static constexpr int LANES = VECTORS < 32 ? power_of_two_from(VECTORS) : 32, ROWS = BLOCK / LANES;
  static constexpr int TURNS = TILE / ROWS, BATCH = TURNS < 16 ? TURNS : 16;
  static_assert(TURNS % BATCH == 0, "whole batches of rows for each thread");

  static __device__ __forceinline__ int after(int stage) { return stage + 1 == STAGES ? 0 : stage + 1; }
  static __device__ __forceinline__ int before(int stage) { return (stage ? stage : STAGES) - 1; }

  // Starts the copies of the tokens at hand and goes on to the next ones. from: the first token of the sequence, or of
  // all pages, in each source. Zeros beyond the end, where there is no page, and for drafts that no row of the tile
  // sees. Always closes a group.
  template <int TILE_ROWS, typename Tokens>
  __device__ __forceinline__ void start(const AttentionArguments &a, Tokens &tokens, const T *const (&from)[SOURCES],
                                        int stage) const {
    if (tokens.at.start < tokens.at.end) {
#pragma unroll 1
      for (int turn = 0; turn < TURNS; turn += BATCH)
        copy_batch<TILE_ROWS>(a, tokens, from, stage, turn * ROWS + threadIdx.x / LANES);
      tokens.template advance<TILE>(a);
    }
    copy_async_commit();
  }

  // The rows `first`, `first` + ROWS, .. of the tile.
  template <int TILE_ROWS, typename Tokens>
  __device__ __forceinline__ void copy_batch(const AttentionArguments &a, const Tokens &tokens,
                                             const T *const (&from)[SOURCES], int stage, int first) const {
    const TileRange at = tokens.at;
    unsigned seen = ~0u;
    if constexpr (Tokens::CHOSEN) {
      const TileViews<TILE_ROWS> &views = tokens.template views<TILE_ROWS>();
      if (min(at.end, at.start + TILE) > views.tile.draft_begin) {
#pragma unroll 1
        for (int i = 0; i < BATCH; ++i)
          if (!any_sees(views, min(at.start + first + i * ROWS, at.end - 1))) seen &= ~(1u << i);
      }
    }
    int pages[BATCH]; // all are asked for before a copy waits for one
    if constexpr (Tokens::PAGED) {
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        const int token = at.start + first + i * ROWS;
        pages[i] = token < at.end && seen >> i & 1u ? find_page(a, token) : -1;
      }
    }
    const T *rows[SOURCES];
#pragma unroll
    for (int s = 0; s < SOURCES; ++s)
      rows[s] = Tokens::PAGED ? from[s] : from[s] + (at.start + first) * (s ? a.v : a.k).row_stride;
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int token = at.start + first + i * ROWS;
      const bool valid = Tokens::PAGED ? pages[i] >= 0 : token < at.end && seen >> i & 1u;
#pragma unroll
      for (int s = 0; s < SOURCES; ++s) {
        const Strided &source = s ? a.v : a.k;
        const T *row = rows[s];
        if (Tokens::PAGED && valid) row += row_in_page(a, pages[i], token, source);
#pragma unroll
        for (int vector = threadIdx.x % LANES; vector < VECTORS; vector += LANES)
          copy_async(this->row(stage, s, first + i * ROWS) + vector * ELEMENTS, row + vector * ELEMENTS, valid);
        rows[s] += Tokens::PAGED ? 0 : ROWS * source.row_stride;
      }
    }
  }

  // The same in TURNS parts, for tokens in a row, all of which are seen: between two of them there is time for others.
  // rows: where this thread's next row of each source lies.
  __device__ __forceinline__ void find_rows(const AttentionArguments &a, const TileRange &at,
                                            const T *const (&from)[SOURCES], const T *(&rows)[SOURCES]) const {
#pragma unroll
    for (int s = 0; s < SOURCES; ++s)
      rows[s] =
          from[s] + (at.start + (int)threadIdx.x / LANES) * (s ? a.v : a.k).row_stride + threadIdx.x % LANES * ELEMENTS;
  }

  __device__ __forceinline__ void copy_turn(const AttentionArguments &a, const TileRange &at, const T *(&rows)[SOURCES],
                                            int stage, int turn) const {
    const int row = turn * ROWS + threadIdx.x / LANES, vector = threadIdx.x % LANES;
#pragma unroll
    for (int s = 0; s < SOURCES; ++s) {
      if (vector < VECTORS) copy_async(this->row(stage, s, row) + vector * ELEMENTS, rows[s], row < at.end - at.start);
      rows[s] += ROWS * (s ? a.v : a.k).row_stride;
    }
  }

  // What this thread copied of a stage, into `to` as numbers of 16 bits: it has to wait for its own copies alone. A few
  // rows are loaded before one is stored: loads behind a store would wait for it, one after another.
  template <typename Wide, int WIDE_PITCH>
  __device__ __forceinline__ void widen(int stage, const Tiles<Wide, WIDE_PITCH, SOURCES, TILE> &to) const {
    constexpr int LOADS = (VECTORS + LANES - 1) / LANES, TOGETHER = TURNS < 4 ? TURNS : 4 / LOADS;
    constexpr int COUNT = TOGETHER * SOURCES * LOADS;
    static_assert(TURNS % TOGETHER == 0, "whole groups of rows");
#pragma unroll
    for (int first = 0; first < TURNS; first += TOGETHER) {
      Vector held[COUNT];
#pragma unroll
      for (int pass = 0; pass < 2; ++pass)
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
          const int row = (first + i / (SOURCES * LOADS)) * ROWS + threadIdx.x / LANES, s = i / LOADS % SOURCES;
          const int vector = i % LOADS * LANES + threadIdx.x % LANES;
          if (vector >= VECTORS) continue;
          if (pass == 0)
            held[i] = *reinterpret_cast<const Vector *>(this->row(stage, s, row) + vector * ELEMENTS);
          else
            dequantize(held[i], reinterpret_cast<Vector *>(to.row(0, s, row) + vector * ELEMENTS), T{}, Wide{});
        }
    }
  }
};
