/* In which order the tokens of a piece of work are read: its blocks, where they lie, and what is prefetched. */
#ifndef TREEATTN_READ_ORDER_H
#define TREEATTN_READ_ORDER_H

#include <stdlib.h>

#include "attend_block.h"
#include "token_rows.h"

/* Some tokens of some KV heads of one batch row, as blocks in the order in which they are read. */
struct span {
  const char *k, *v;              /* the first head; its first token, where tokens lie in a row */
  const int64_t *k_rows, *v_rows; /* [tokens]: how far from there each token's row is; NULL: they lie in a row */
  int64_t tokens, heads, blocks;
  int scattered;
};

/* SCATTERED: block `i` holds every blocks-th token from the i-th on: BLOCK rows far apart, each followed by its
 * neighbour in the next block. The number of blocks is odd, lest the streams fall into one set of the cache.
 * NEIGHBOURS: block `i` holds the i-th BLOCK tokens. */
static int64_t block_count(int scattered, int64_t tokens) {
  const int64_t blocks = (tokens + BLOCK - 1) / BLOCK;
  return scattered && blocks > 8 ? blocks | 1 : blocks;
}

/* The first token of a block. */
static int64_t token_at(const struct span *s, int64_t block) { return s->scattered ? block : block * BLOCK; }

/* From each of its tokens to the next. */
static int64_t step_of(const struct span *s) { return s->scattered ? s->blocks : 1; }

/* Head by head where a head's tokens are neighbours in memory, else block by block through all the heads. */
static int64_t head_at(const struct attention *a, const struct span *s, int64_t step) {
  return llabs(a->k_head_stride) > llabs(a->k_token_stride) ? step / s->blocks : step % s->heads;
}

static int64_t block_at(const struct attention *a, const struct span *s, int64_t step) {
  return llabs(a->k_head_stride) > llabs(a->k_token_stride) ? step % s->blocks : step / s->heads;
}

static const char *key_at(const struct attention *a, const struct span *s, int64_t token, int64_t head) {
  return s->k + (s->k_rows ? s->k_rows[token] : token * a->k_token_stride) + head * a->k_head_stride;
}

static const char *value_at(const struct attention *a, const struct span *s, int64_t token, int64_t head) {
  return s->v + (s->v_rows ? s->v_rows[token] : token * a->v_token_stride) + head * a->v_head_stride;
}

/* Whether tokens of a block lie one after the other, from `token` on. In pages no smaller than a block they are of two
 * pages at most, which follow one another if first and last token lie as if they did. */
static int lie_in_row(const struct attention *a, const struct span *s, int64_t token, int tokens) {
  if (!s->k_rows) return 1;
  const int64_t last = token + tokens - 1;
  return !s->scattered && tokens <= a->page_size &&
         s->k_rows[last] - s->k_rows[token] == (tokens - 1) * a->k_token_stride &&
         s->v_rows[last] - s->v_rows[token] == (tokens - 1) * a->v_token_stride;
}

/* The rows of a block of `tokens` tokens, of which `token` is the first. Those of tokens in a row lie from one another
 * as in the block before, which is not worked out again. */
static void point_at_tokens(const struct attention *a, const struct span *s, int64_t token, int64_t head, int tokens,
                            struct block *b) {
  const int64_t step = step_of(s);
  const int in_row = lie_in_row(a, s, token, tokens);
  b->k = key_at(a, s, token, head), b->v = value_at(a, s, token, head);
  if (b->tokens == tokens && in_row && b->in_row) return;
  b->tokens = tokens, b->in_row = in_row;
  b->k_step = step * a->k_token_stride, b->v_step = step * a->v_token_stride;
  for (int t = 0; t < BLOCK; ++t) {
    const int64_t known = token + (t < tokens ? t : tokens - 1) * step;
    b->k_rows[t] = key_at(a, s, known, head) - b->k;
    b->v_rows[t] = value_at(a, s, known, head) - b->v;
  }
}

/* What is prefetched at step `step`, for keys or values: the block of a later step, token by token. Where the heads of
 * neighbouring tokens fill memory without a gap, all heads of the block that comes are dealt out to the steps of this
 * one in the order of memory, as if each were BLOCK rows of a head without a gap. At the end of a page the hardware no
 * longer foresees what comes: in pages blocks of few bytes are asked for earlier. `share`: from a token to the next. */
static const char *coming(const struct attention *a, const struct span *s, int64_t step, int keys, int64_t *share) {
  const int64_t token = keys ? a->k_token_stride : a->v_token_stride, head = keys ? a->k_head_stride : a->v_head_stride;
  enum { FORESEEN = 16384 }; /* bytes */
  if (a->order == NEIGHBOURS && token == s->heads * head) {
    const int64_t far = s->k_rows && token > 0 ? (FORESEEN + BLOCK * token - 1) / (BLOCK * token) : 1;
    const int64_t next = block_at(a, s, step) + far, block = next < s->blocks ? next : s->blocks - 1;
    const int64_t share_of = head_at(a, s, step) * BLOCK; /* rows of heads before this step's */
    *share = head;
    if (!s->k_rows) return (keys ? s->k : s->v) + (block * s->heads * BLOCK + share_of) * head;
    const int64_t first = block * BLOCK + share_of / s->heads;
    const int64_t known = first < s->tokens ? first : s->tokens - 1; /* a short block has no such rows */
    return keys ? key_at(a, s, known, share_of % s->heads) : value_at(a, s, known, share_of % s->heads);
  }
  enum { AHEAD = 2 };
  const int64_t last = s->blocks * s->heads - 1, later = step + AHEAD < last ? step + AHEAD : last;
  const int64_t first = token_at(s, block_at(a, s, later));
  *share = step_of(s) * token;
  return keys ? key_at(a, s, first, head_at(a, s, later)) : value_at(a, s, first, head_at(a, s, later));
}

#endif
