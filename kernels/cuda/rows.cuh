// What the multiply-add kernels share: elements widened, and rows whose online softmax a group of lanes keeps, a few
// tokens at a time.
#pragma once
#include "tokens.cuh"

__device__ __forceinline__ void unpack(const Vector &v, float *to, float) {
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = __uint_as_float(v.word[i]);
}

template <typename T> __device__ __forceinline__ void unpack(const Vector &v, float *to, T type) {
  if constexpr (sizeof(T) == 1) {
    dequantize(v, to, type);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      to[2 * i] = to_float(T{(unsigned short)(v.word[i] & 0xffffu)});
      to[2 * i + 1] = to_float(T{(unsigned short)(v.word[i] >> 16)});
    }
  }
}

// One row's online softmax in one lane: `numerator` has the elements that the lane holds.
template <int HELD> struct RowState {
  float maximum, denominator, numerator[HELD];
};

// Takes COUNT scores in: they become weights, and what was summed before is rescaled.
template <int HELD, int COUNT>
__device__ __forceinline__ void online_softmax(RowState<HELD> &state, float (&scores)[COUNT]) {
  float top = state.maximum;
#pragma unroll
  for (int u = 0; u < COUNT; ++u) top = fmaxf(top, scores[u]);
  const float base = top == negative_infinity() ? 0.0f : top; // -inf minus -inf would be NaN
  const float factor = weigh(state.maximum - base);
  state.maximum = top;
  state.denominator *= factor;
#pragma unroll
  for (int i = 0; i < HELD; ++i) state.numerator[i] *= factor;
#pragma unroll
  for (int u = 0; u < COUNT; ++u) {
    scores[u] = weigh(scores[u] - base);
    state.denominator += scores[u];
  }
}

// scores[row][token] summed over the lanes of a group. Sums of different rows and tokens take turns, so that the wait
// for one shuffle is filled with others.
template <int LANES, int ROWS, int COUNT> __device__ __forceinline__ void sum_over_lanes(float (&scores)[ROWS][COUNT]) {
#pragma unroll
  for (int distance = LANES / 2; distance > 0; distance /= 2)
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int u = 0; u < COUNT; ++u) scores[r][u] += __shfl_xor_sync(ALL_LANES, scores[r][u], distance);
}

// What becomes of scores[row][token] where queries see some tokens only: of rows from `first_row` of the tile on, and
// of tokens `token` and each other TOKENS further on, at a step that begins at `place`. Returns the scores that are
// hidden, a bit for each: their tokens are not to be multiplied by 0, since nobody knows what is there.
template <int TOKENS, int STEP, int TILE_ROWS, int ROWS, int COUNT>
__device__ __forceinline__ unsigned choose_scores(const AttentionArguments &a, const TileViews<TILE_ROWS> &views,
                                                  int first_row, const TileRange &place, int token,
                                                  float (&scores)[ROWS][COUNT]) {
  if (a.softcap > 0.0f) {
#pragma unroll
    for (int e = 0; e < ROWS * COUNT; ++e) scores[e / COUNT][e % COUNT] = cap(a, scores[e / COUNT][e % COUNT]);
  }
  if (a.mask.slopes) {
#pragma unroll
    for (int u = 0; u < COUNT; ++u) {
      const int at = token + u * TOKENS;
      if (at >= place.end) break;
      const long long position = position_of(a, views.tile, at);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) scores[r][u] = bias(views.rows[first_row + r], position, scores[r][u]);
    }
  }
  if (see_all<STEP>(views, place)) return 0u;
  unsigned hidden = 0u;
#pragma unroll
  for (int e = 0; e < ROWS * COUNT; ++e) {
    const int at = token + e % COUNT * TOKENS;
    if (at < place.end && sees(views, first_row + e / COUNT, at)) continue;
    scores[e / COUNT][e % COUNT] = negative_infinity();
    hidden |= 1u << e;
  }
  return hidden;
}
