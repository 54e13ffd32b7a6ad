/* Where the rows of a sequence's tokens lie: one after the other, or in pages that lie anywhere. */
#ifndef TREEATTN_TOKEN_ROWS_H
#define TREEATTN_TOKEN_ROWS_H

#include "partial_attention.h"

/* Bytes from the first row of all keys, or of all values, to those of the tokens begin..end of batch row `b`. */
static inline void find_rows(const struct attention *a, int64_t b, int64_t begin, int64_t end, int keys,
                             int64_t *rows) {
  const int64_t far = keys ? a->k_batch_stride : a->v_batch_stride, near = keys ? a->k_token_stride : a->v_token_stride;
  if (!a->block_table) {
    for (int64_t token = begin; token < end; ++token) *rows++ = b * far + token * near;
    return;
  }
  const int32_t *page = a->block_table + b * a->pages + begin / a->page_size;
  for (int64_t slot = begin % a->page_size, count; begin < end; slot = 0, begin += count, rows += count) {
    const int64_t first = *page++ * far + slot * near;
    count = end - begin < a->page_size - slot ? end - begin : a->page_size - slot;
    for (int64_t i = 0; i < count; ++i) rows[i] = first + i * near;
  }
}

/* Whether values lie as keys do, from their first row on. */
static inline int lie_alike(const struct attention *a) {
  return a->k_batch_stride == a->v_batch_stride && a->k_token_stride == a->v_token_stride;
}

#endif
