// What the tensor-core kernels share: scores of 16 rows as a matrix product leaves them in a warp. A thread holds two
// rows, lane / 4 and 8 more, and of every 8 tokens two, 2 (lane % 4) and the next: score j of eight n is of rows[j / 2]
// and token `token` + 8 n + j % 2. The four lanes that share a row are neighbours.
#pragma once
#include "tokens.cuh"

// What becomes of a thread's products where queries see some tokens only, in a tile of STEP tokens at `place`.
template <int STEP, int ROWS, int EIGHTS>
__device__ __forceinline__ void choose_scores(const AttentionArguments &a, const TileViews<ROWS> &views,
                                              const TileRange &place, int token, const int (&rows)[2], float scale,
                                              float (&scores)[EIGHTS][4]) {
#pragma unroll
  for (int e = 0; e < 4 * EIGHTS; ++e) scores[e / 4][e % 4] *= scale;
  if (a.softcap > 0.0f) {
#pragma unroll
    for (int e = 0; e < 4 * EIGHTS; ++e) scores[e / 4][e % 4] = cap(a, scores[e / 4][e % 4]);
  }
  if (a.mask.slopes) {
#pragma unroll
    for (int t = 0; t < 2 * EIGHTS; ++t) {
      const int at = token + t / 2 * 8 + t % 2;
      if (at >= place.end) break;
      const long long position = position_of(a, views.tile, at);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float &score = scores[t / 2][2 * half + t % 2];
        score = bias(views.rows[rows[half]], position, score);
      }
    }
  }
  if (see_all<STEP>(views, place)) return;
#pragma unroll
  for (int e = 0; e < 4 * EIGHTS; ++e) {
    const int at = token + e / 4 * 8 + e % 2;
    if (at >= place.end || !sees(views, rows[e % 4 / 2], at)) scores[e / 4][e % 4] = negative_infinity();
  }
}

// Products become logits, -inf where there is no such token or a row does not see it.
template <int STEP, int ROWS, typename Tokens, int EIGHTS>
__device__ __forceinline__ void find_scores(const AttentionArguments &a, const Tokens &tokens, const TileRange &place,
                                            int token, const int (&rows)[2], float scale, float (&scores)[EIGHTS][4]) {
  if constexpr (Tokens::CHOSEN) {
    choose_scores<STEP>(a, tokens.template views<ROWS>(), place, token, rows, scale, scores);
  } else {
#pragma unroll
    for (int n = 0; n < EIGHTS; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        scores[n][j] = token + n * 8 + j % 2 < place.end ? scores[n][j] * scale : negative_infinity();
  }
}

// The online softmax of a thread's two rows. The denominators are of its own scores alone.
struct RowPair {
  float maximum[2] = {negative_infinity(), negative_infinity()}, denominator[2] = {0.0f, 0.0f};

  // Takes scores in: they become weights. What was summed before is to be multiplied by `factor` of its row.
  template <int EIGHTS> __device__ __forceinline__ void online_softmax(float (&scores)[EIGHTS][4], float (&factor)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = negative_infinity();
#pragma unroll
      for (int n = 0; n < EIGHTS; ++n) top = fmaxf(top, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
      top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 1)); // the four lanes that share the row
      top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 2));
      top = fmaxf(top, maximum[half]);
      const float base = top == negative_infinity() ? 0.0f : top; // -inf minus -inf would be NaN
      factor[half] = weigh(maximum[half] - base);
      maximum[half] = top;
      denominator[half] *= factor[half];
#pragma unroll
      for (int n = 0; n < EIGHTS; ++n)
#pragma unroll
        for (int j = 2 * half; j < 2 * half + 2; ++j) {
          scores[n][j] = weigh(scores[n][j] - base);
          denominator[half] += scores[n][j];
        }
    }
  }

  // The denominators become those of the rows.
  __device__ __forceinline__ void sum_denominators() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      denominator[half] += __shfl_xor_sync(ALL_LANES, denominator[half], 1);
      denominator[half] += __shfl_xor_sync(ALL_LANES, denominator[half], 2);
    }
  }
};

// By the factors of a thread's two rows. Most tiles bring no warp a new maximum: then all factors are 1.
template <int COLUMNS>
__device__ __forceinline__ void rescale_numerators(float (&numerator)[COLUMNS][4], const float (&factor)[2]) {
  if (!__any_sync(ALL_LANES, factor[0] != 1.0f || factor[1] != 1.0f)) return;
#pragma unroll
  for (int n = 0; n < COLUMNS; ++n)
#pragma unroll
    for (int j = 0; j < 4; ++j) numerator[n][j] *= factor[j / 2];
}

// The weights of 16 tokens, `eight` and the next: the scores' layout is that of the left operand of a product.
template <typename T, int EIGHTS>
__device__ __forceinline__ void pack_weights(unsigned (&to)[4], const float (&scores)[EIGHTS][4], int eight) {
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = pack(scores[eight + i / 2][i % 2 * 2], scores[eight + i / 2][i % 2 * 2 + 1], T{});
}
