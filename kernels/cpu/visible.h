/* What each query may see of a shard: tables that are filled once per step, described in
 * treeattn/attention/visibility.py, and what of the cache is read for them. */
#ifndef TREEATTN_VISIBLE_H
#define TREEATTN_VISIBLE_H

#include <stdint.h>

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

struct visible {
  const int64_t *intervals;       /* [batch, queries, 4]: begin, end, begin, end of tokens, drafts aside */
  const int64_t *q_positions;     /* [batch, queries] */
  const int64_t *runs;            /* [run_count, 4]: index of the first token, its position, step, count */
  const double *slopes;           /* [heads], or NULL: no ALiBi */
  const uint32_t *mask;           /* [batch, queries, mask_words]: bit j of them: whether draft token j is seen */
  const int64_t *draft_begins;    /* [batch]: the first draft token */
  const int64_t *draft_positions; /* [batch, drafts] */
  int64_t run_count, drafts, mask_words;
  float softcap; /* 0: none */
};

/* Neighbouring tokens of which some query sees something. Where they are uniform, a query sees all or none of them. */
struct stretch {
  int64_t begin, end, before; /* before: how many tokens all stretches before it have */
  int64_t uniform;
};

/* As many as there can be in a batch row: between two of the 4 ends of each query's intervals, and the drafts. */
static inline int64_t most_stretches(int64_t queries) { return 4 * queries + 1; }

/* The first batch row, counted from 1, that has an interval or a draft outside the shard's tokens; 0 for none. */
int64_t find_outside(const struct visible *v, int64_t batch, int64_t queries, int64_t tokens);

/* The stretches of batch row `b`, ascending; returns how many. `ends` has room for 4 * queries numbers. */
int64_t find_stretches(const struct visible *v, int64_t b, int64_t queries, int64_t *ends, struct stretch *to);

/* Which of `count` <= 16 tokens of one stretch, from `first` on, query `i` of batch row `b` sees, as bits. */
uint32_t visible_bits(const struct visible *v, int64_t b, int64_t queries, int64_t i, int64_t first, int64_t count);

/* Positions of the tokens begin..end of one stretch of batch row `b`. */
void find_positions(const struct visible *v, int64_t b, int64_t begin, int64_t end, double *positions);

#endif
