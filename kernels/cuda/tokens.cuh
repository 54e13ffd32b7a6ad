// Which tokens a block takes, a step at a time: all valid ones, or what the queries of its tile may see. And what
// becomes of a logit there.
//
// What a tile's queries see together are spans of tokens. Steps are numbered through all spans of a tile, each of which
// begins one, and a split is a range of them: tokens outside the spans cost nothing. Whether one query sees one token
// is only asked outside the range that all of the tile see.
#pragma once
#include "attention.cuh"

// A step's first token, and where the tokens end that it may take.
struct TileRange {
  int start, end;
};

// Valid tokens, all of them.
struct AllTokens {
  static constexpr bool CHOSEN = false, PAGED = false;
  long long length;
  TileRange at;

  // The length is read from the device's memory at every launch, where a captured graph follows a growing cache; else
  // it is an argument. Nothing is written after the load, which would make the block wait for it.
  __device__ __forceinline__ AllTokens(const AttentionArguments &a, const Work &)
      : length(a.few_lengths[blockIdx.z % FEW]) {
    if (a.lengths) length = a.lengths[blockIdx.z];
  }

  // Goes to the first step of the block; splits are whole numbers of steps, but for the last.
  template <int STEP> __device__ __forceinline__ void find(const AttentionArguments &a, const Work &w) {
    const int valid = (int)(length < 0 ? 0 : length > a.tokens ? a.tokens : length);
    const int steps = (valid + STEP - 1) / STEP, chunk = divide(steps + w.splits - 1, a.scratch.by_splits) * STEP;
    const long long begin = (long long)w.split * chunk;
    at.start = (int)(begin < valid ? begin : valid);
    at.end = valid - at.start > chunk ? at.start + chunk : valid;
  }

  template <int STEP> __device__ __forceinline__ void advance(const AttentionArguments &) { at.start += STEP; }
};

// Written by treeattn/backends/cuda/visible.py, which has the same fields in the same order.

// What the queries of a tile of rows see together.
struct alignas(16) TileView {
  int first_span, spans, steps;
  int begin, end;             // of the first span, which so needs no load of its own
  int whole_begin, whole_end; // every query of the tile sees these tokens
  int draft_begin;            // the first draft token, beyond all tokens where there are none
};

// Tokens begin..end; the tile has first_step steps before them.
struct alignas(16) Span {
  int begin, end, first_step, unused;
};

// What one query sees before the draft: tokens bound[0]..[1] and [2]..[3].
struct alignas(16) QueryView {
  int bound[4];
};

// What may move from step to step.
struct TokenTables {
  const long long *runs;            // [run_count, 4]: index, position, step, count of tokens before the draft
  const unsigned *mask;             // [batch, queries, mask_words]: bit j % 32 of word j / 32 is draft token j
  const long long *draft_positions; // [batch, drafts]
  long long run_count, drafts, mask_words;
};

// What a row of the tile sees, and from where.
struct alignas(16) RowView {
  QueryView sees;
  const unsigned *mask; // of its query
  long long position;
  float slope;
};

// A tile and its rows, in shared memory: registers are scarcer.
template <int ROWS> struct TileViews {
  TileView tile;
  RowView rows[ROWS];
};

// What the tile's queries see.
struct VisibleTokens {
  static constexpr bool CHOSEN = true, PAGED = false;
  TileView tile;
  int span, left; // and the steps of the block from here on
  TileRange at;

  __device__ __forceinline__ VisibleTokens(const AttentionArguments &a, const Work &w)
      : tile(a.mask.tiles[w.batch * divide(gridDim.y, a.by_kv_heads) + w.tile]) {}

  template <int STEP> __device__ __forceinline__ void find(const AttentionArguments &a, const Work &w) {
    const int chunk = divide(tile.steps + w.splits - 1, a.scratch.by_splits), first = w.split * chunk;
    left = min(chunk, tile.steps - first);
    span = tile.first_span;
    Span found = {tile.begin, tile.end, 0, 0};
    for (int i = 1; i < tile.spans && a.mask.spans[span + 1].first_step <= first; ++i) found = a.mask.spans[++span];
    at = {found.begin + (first - found.first_step) * STEP, found.end};
    if (left <= 0) at = {0, 0};
  }

  template <int STEP> __device__ __forceinline__ void advance(const AttentionArguments &a) {
    at.start += STEP;
    if (--left <= 0) {
      at = {0, 0};
    } else if (at.start >= at.end) {
      const Span next = a.mask.spans[++span];
      at = {next.begin, next.end};
    }
  }

  template <int ROWS> static __device__ __forceinline__ TileViews<ROWS> &views() {
    __shared__ TileViews<ROWS> shared;
    return shared;
  }

  // Writes the views, before a barrier.
  template <int ROWS> __device__ __forceinline__ void load_views(const AttentionArguments &a, const Work &w) const {
    if (threadIdx.x == 0) views<ROWS>().tile = tile;
    if (threadIdx.x >= ROWS) return;
    const Row row = find_row(a, w, ROWS, threadIdx.x);
    const long long query = (long long)w.batch * a.queries + row.query;
    views<ROWS>().rows[threadIdx.x] = {a.mask.views[query], a.mask.lookup->mask + query * a.mask.lookup->mask_words,
                                       a.mask.q_positions[query], a.mask.slopes ? a.mask.slopes[row.head] : 0.0f};
  }
};

// The same tokens, in pages that lie anywhere.
template <typename Tokens> struct Paged : Tokens {
  static constexpr bool PAGED = true;
  using Tokens::Tokens;
};

// The page of a token of the block's sequence; below 0: none.
__device__ __forceinline__ int find_page(const AttentionArguments &a, int token) {
  return a.pages.table[(long long)blockIdx.z * a.pages.count + divide(token, a.pages.by_size)];
}

// How far from the first element of all pages the row of a token lies.
__device__ __forceinline__ long long row_in_page(const AttentionArguments &a, int page, int token, const Strided &in) {
  return page * in.batch_stride + (token - divide(token, a.pages.by_size) * a.pages.size) * in.row_stride;
}

// Do all queries of the tile see all tokens of this step?
template <int STEP, int ROWS>
__device__ __forceinline__ bool see_all(const TileViews<ROWS> &views, const TileRange &place) {
  return place.start >= views.tile.whole_begin && place.start + STEP <= views.tile.whole_end;
}

template <int ROWS> __device__ __forceinline__ bool sees(const TileViews<ROWS> &views, int row, int token) {
  const RowView &view = views.rows[row];
  const int draft = token - views.tile.draft_begin, *bound = view.sees.bound;
  if (draft >= 0) return view.mask[draft / 32] >> (draft % 32) & 1;
  return (token >= bound[0] && token < bound[1]) || (token >= bound[2] && token < bound[3]);
}

// Does any row of the tile? The spans hold what somebody sees, but for the draft, of which they hold all.
template <int ROWS> __device__ __forceinline__ bool any_sees(const TileViews<ROWS> &views, int token) {
  if (token < views.tile.draft_begin) return true;
#pragma unroll 1
  for (int r = 0; r < ROWS; ++r)
    if (sees(views, r, token)) return true;
  return false;
}

// Where a token of the block stands in the whole sequence.
__device__ __forceinline__ long long position_of(const AttentionArguments &a, const TileView &tile, int token) {
  const TokenTables &lookup = *a.mask.lookup;
  const int draft = token - tile.draft_begin;
  if (draft >= 0) return lookup.draft_positions[blockIdx.z * lookup.drafts + draft];
  int run = 0, above = (int)lookup.run_count; // the last that begins at or before the token
  while (run + 1 < above) {
    const int middle = (run + above) / 2;
    (lookup.runs[4 * middle] <= token ? run : above) = middle;
  }
  const long long *found = lookup.runs + 4 * run;
  return found[1] + (token - found[0]) * found[2];
}

// tanh(x), its relative error a few units in the last place: Cephes' polynomial near 0, else 1 - 2 / (e^2|x| + 1).
__device__ __forceinline__ float hyperbolic_tangent(float x) {
  const float magnitude = fabsf(x), square = x * x;
  const float far = fmaf(-2.0f, reciprocal_fast(weigh(2.0f * magnitude) + 1.0f), 1.0f);
  float near = -5.70498872745e-3f;
  near = fmaf(near, square, 2.06390887954e-2f);
  near = fmaf(near, square, -5.37397155531e-2f);
  near = fmaf(near, square, 1.33314422036e-1f);
  near = fmaf(near, square, -3.33332819422e-1f);
  near = fmaf(near * square, x, x);
  return magnitude < 0.625f ? near : copysignf(far, x);
}

// A logit under the softcap: softcap * tanh(logit / softcap).
__device__ __forceinline__ float cap(const AttentionArguments &a, float logit) {
  return a.softcap * hyperbolic_tangent(logit * a.by_softcap);
}

// A logit under ALiBi: less slope * distance. Distances below 2^24 are exact, and are rounded once, with the logit.
__device__ __forceinline__ float bias(const RowView &view, long long position, float logit) {
  return fmaf(-view.slope, (float)(view.position - position), logit);
}
