// Latent attention: all query heads share one head of keys, whose first channels are the values too (DeepSeek-V2,
// arXiv 2405.04434: keys of 576, values of 512). What both kernels for it share.
//
// A block takes 16 rows, query heads for the most part. A key is brought once for all of them, for scores and sums
// alike, into shared memory, where each warp finds what it needs. More rows than 16 are other blocks, which take the
// same tokens at about the same time: memory is read once, as long as the second-level cache serves the others.
#pragma once
#include "combine.cuh"
#include "tokens.cuh"

constexpr int ROWS = 16;

// STAGES tiles of TILE keys, each in a row of PITCH elements of shared memory.
template <typename T, int HEAD_DIM, int PITCH, int TILE, int STAGES> struct KeyStages {
  static constexpr int ELEMENTS = 16 / sizeof(T), VECTORS = HEAD_DIM / ELEMENTS; // of a vector, of a key
  T *keys;

  __device__ __forceinline__ T *row(int stage, int token) const { return keys + (stage * TILE + token) * PITCH; }

  static __device__ __forceinline__ int after(int stage) { return stage + 1 == STAGES ? 0 : stage + 1; }
  static __device__ __forceinline__ int before(int stage) { return (stage ? stage : STAGES) - 1; }

  // Starts the copies of the tokens at hand and goes on to the next ones, k being the first key of the sequence, or of
  // all pages. Zeros beyond the end, where there is no page, and for drafts that no row sees. Always closes a group.
  template <typename Tokens>
  __device__ __forceinline__ void start(const AttentionArguments &a, Tokens &tokens, const T *k, int stage) const {
    static_assert(TILE * VECTORS % THREADS == 0, "as many copies for each thread");
    const Place at = tokens.at;
    if (at.start < at.end) {
#pragma unroll 3
      for (int i = 0; i < TILE * VECTORS / THREADS; ++i) {
        const int e = i * THREADS + threadIdx.x, index = e % VECTORS * ELEMENTS, token = at.start + e / VECTORS;
        bool valid = token < at.end;
        if constexpr (Tokens::CHOSEN) valid = valid && any_sees(tokens.template views<ROWS>(), token);
        const T *from = k;
        if constexpr (Tokens::PAGED) {
          const int page = valid ? find_page(a, token) : -1;
          valid = page >= 0;
          if (valid) from += row_in_page(a, page, token, a.k_batch_stride, a.k_token_stride);
        } else if (valid) {
          from += token * a.k_token_stride;
        }
        copy_async(row(stage, e / VECTORS) + index, from + index, valid);
      }
      tokens.template advance<TILE>(a);
    }
    copy_async_commit();
  }
};
