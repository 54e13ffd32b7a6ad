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
  for (int64_t slot = begin % a->page_size; begin < end; slot = 0, ++page)
    for (; begin < end && slot < a->page_size; ++begin, ++slot) *rows++ = *page * far + slot * near;
}

#endif
