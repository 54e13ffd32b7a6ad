/* Many query rows attend to a block of tokens: keys and values are read once for all of them.
 *
 * Rows lie side by side in the lanes of vectors, PANEL of them, so that the softmax of all is arithmetic of whole
 * vectors, and a key needs no transposing: its channels are spread over lanes one by one. Tokens, then rows, go through
 * in tiles whose sums fill the registers. Sums stay short: over SEGMENT channels or BLOCK tokens, then these are added.
 */
#ifndef TREEATTN_ATTEND_TILE_H
#define TREEATTN_ATTEND_TILE_H

#include "hyperbolic_tangent.h"

enum {
  PANEL = 48,                       /* rows */
  BLOCK = 48,                       /* tokens; whole tiles of either */
  TILE = 6,                         /* rows whose values are summed together */
  VECTORS = REGISTERS / 8,          /* of values summed together, for each row of a TILE */
  SUMS = TILE * VECTORS,            /* that registers hold beside what is added to them */
  SCORED = REGISTERS == 32 ? 3 : 2, /* vectors of rows scored together */
  SEGMENT = 64,                     /* channels that are packed together */
  PACKED = BLOCK * SEGMENT + 16,    /* floats to the next ones, in other sets of the cache */
};

/* Up to PANEL rows. Lanes without a row hold q = 0 and are never written out. */
struct panel {
  int rows;
  const float *q;                /* [key_floats][PANEL], scaled, channels in unit order */
  float *numerator;              /* [rows][value_floats], in unit order */
  float *maximum, *denominator;  /* [PANEL] */
  const float *slope, *distance; /* [PANEL]: ALiBi, and how far the block's first token lies before the query */
  const uint64_t *seen;          /* [PANEL]: bit t: whether the row sees token t of the block */
};

/* What is packed next, in the order of memory: prefetched meanwhile, a few lines at a time, for a core stands still
 * when it waits for many. */
struct coming {
  const char *first;
  int64_t rows[BLOCK];        /* bytes from there to each */
  int row, lines, line, step; /* lines of a row, and where to go on; step: lines at a time, 0: nothing comes */
};

/* Tokens packed as [segments][BLOCK][SEGMENT] of float32 (segments PACKED apart), 0 where nobody sees a token. */
struct tokens {
  const float *keys, *values;
  int key_floats, value_floats; /* channels rounded up to whole units */
  struct coming next_keys, next_values;
  const float *offset; /* [BLOCK]: position, from that of the block's first token on; NULL: no ALiBi */
  float softcap;       /* 0: none */
};

/* scores[t][row] (+)= key[t] . q[row] over the channels of a segment. */
INLINE void score_tile(int vectors, int tokens, const float *q, const float *key, int channels, int add,
                       float *scores) {
  vector sum[SUMS];
  for (int i = 0; i < tokens * vectors; ++i) sum[i] = splat(0.0f);
  for (int c = 0; c < channels; ++c, q += PANEL) {
    vector lanes[VECTORS];
    for (int u = 0; u < vectors; ++u) lanes[u] = load(q + u * WIDTH);
    for (int t = 0; t < tokens; ++t) {
      const vector channel = splat(key[t * SEGMENT + c]);
      for (int u = 0; u < vectors; ++u) sum[t * vectors + u] = multiply_add(channel, lanes[u], sum[t * vectors + u]);
    }
  }
  for (int t = 0; t < tokens; ++t)
    for (int u = 0; u < vectors; ++u) {
      float *to = scores + t * PANEL + u * WIDTH;
      store(to, (add ? load(to) : splat(0.0f)) + sum[t * vectors + u]);
    }
}

/* numerator[row] = factor[row] * numerator[row] + weights . values, for tokens begin..end. */
INLINE void add_tile(int vectors, int rows, const float *weights, const float *values, int begin, int end,
                     const float *factor, float *numerator, int64_t pitch) {
  vector sum[SUMS];
  for (int i = 0; i < rows * vectors; ++i) sum[i] = splat(0.0f);
  for (int t = begin; t < end; ++t) {
    vector value[VECTORS];
    for (int u = 0; u < vectors; ++u) value[u] = load(values + t * SEGMENT + u * WIDTH);
    for (int r = 0; r < rows; ++r) {
      const vector weight = splat(weights[t * PANEL + r]);
      for (int u = 0; u < vectors; ++u) sum[r * vectors + u] = multiply_add(value[u], weight, sum[r * vectors + u]);
    }
  }
  for (int r = 0; r < rows; ++r)
    for (int u = 0; u < vectors; ++u) {
      float *to = numerator + r * pitch + u * WIDTH;
      store(to, multiply_add(load(to), splat(factor[r]), sum[r * vectors + u]));
    }
}

static void prefetch_step(struct coming *c) {
  for (int i = 0; i < c->step && c->row < BLOCK; ++i) {
    __builtin_prefetch(c->first + c->rows[c->row] + c->line * 64, 0, 2);
    if (++c->line == c->lines) c->line = 0, ++c->row;
  }
}

static void prefetch_more(struct tokens *block) {
  prefetch_step(&block->next_keys);
  prefetch_step(&block->next_values);
}

/* Channels of segment `i` against the vectors from `first` on, a few tokens at a time. */
INLINE void score_vectors(int vectors, const struct panel *p, struct tokens *block, int i, int first, int begin,
                          int end, float *scores) {
  const int left = block->key_floats - i * SEGMENT, channels = left < SEGMENT ? left : SEGMENT;
  const int tokens = SUMS / vectors < 12 ? SUMS / vectors : 12;
  const float *keys = block->keys + i * PACKED, *q = p->q + i * SEGMENT * PANEL + first * WIDTH;
  for (int t = begin / tokens * tokens; t < end; t += tokens) {
    score_tile(vectors, tokens, q, keys + t * SEGMENT, channels, i, scores + t * PANEL + first * WIDTH);
    if (!first) prefetch_more(block);
  }
}

static __attribute__((noinline)) void score_panel(const struct panel *p, struct tokens *block, int vectors, int begin,
                                                  int end, float *scores) {
  for (int i = 0; i * SEGMENT < block->key_floats; ++i) {
    int u = 0;
    for (; u + SCORED <= vectors; u += SCORED) score_vectors(SCORED, p, block, i, u, begin, end, scores);
    if (vectors - u == 2) score_vectors(2, p, block, i, u, begin, end, scores);
    if (vectors - u == 1) score_vectors(1, p, block, i, u, begin, end, scores);
  }
}

/* Softcap, then ALiBi, then -inf for what a row does not see. */
static void shape_scores(const struct panel *p, const struct tokens *block, int vectors, int begin, int end, int masked,
                         float *scores) {
  if (block->softcap > 0.0f)
    for (int t = begin; t < end; ++t)
      for (float *at = scores + t * PANEL; at < scores + t * PANEL + vectors * WIDTH; at += WIDTH)
        store(at, hyperbolic_tangent(load(at) / block->softcap) * block->softcap);
  if (block->offset)
    for (int t = begin; t < end; ++t)
      for (int i = 0; i < vectors * WIDTH; i += WIDTH) {
        const vector distance = load(p->distance + i) - block->offset[t];
        store(scores + t * PANEL + i, multiply_add(load(p->slope + i), -distance, load(scores + t * PANEL + i)));
      }
  if (masked)
    for (int t = begin; t < end; ++t)
      for (int r = 0; r < vectors * WIDTH; ++r)
        if (!(p->seen[r] >> t & 1)) scores[t * PANEL + r] = -INFINITY;
}

/* Scores to weights exp(score - maximum), in place; factor: of what was summed before. */
static __attribute__((noinline)) void weigh_panel(const struct panel *p, int vectors, int begin, int end, float *scores,
                                                  float *factor) {
  for (int i = 0; i < vectors * WIDTH; i += WIDTH) {
    const vector before = load(p->maximum + i);
    vector highest = before, sum = splat(0.0f);
    for (int t = begin; t < end; ++t) highest = larger(load(scores + t * PANEL + i), highest);
    const vector_int nothing = highest == -INFINITY; /* -inf - -inf would be NaN */
    const vector base = (vector)((vector_int)highest & ~nothing);
    for (int t = begin; t < end; ++t) {
      const vector weight = exponential_lanes(load(scores + t * PANEL + i) - base);
      store(scores + t * PANEL + i, weight);
      sum += weight;
    }
    const vector rescale = exponential_lanes(before - base);
    store(factor + i, rescale);
    store(p->denominator + i, multiply_add(load(p->denominator + i), rescale, sum));
    store(p->maximum + i, highest);
  }
}

/* The channels d.. of `vectors` vectors for all rows of a panel. */
INLINE void add_channels(int vectors, const struct panel *p, struct tokens *block, int d, int begin, int end,
                         const float *weights, const float *factor) {
  const float *values = block->values + (int64_t)(d / SEGMENT) * PACKED + d % SEGMENT;
  const int64_t pitch = block->value_floats;
  float *to = p->numerator + d;
  int r = 0;
  for (; r + TILE <= p->rows; r += TILE) {
    add_tile(vectors, TILE, weights + r, values, begin, end, factor + r, to + r * pitch, pitch);
    if (d % SEGMENT == 0) prefetch_more(block);
  }
  const int left = p->rows - r; /* the compiler unrolls each, and keeps sums in registers */
  weights += r, factor += r, to += r * pitch;
  if (left == 5) add_tile(vectors, 5, weights, values, begin, end, factor, to, pitch);
  if (left == 4) add_tile(vectors, 4, weights, values, begin, end, factor, to, pitch);
  if (left == 3) add_tile(vectors, 3, weights, values, begin, end, factor, to, pitch);
  if (left == 2) add_tile(vectors, 2, weights, values, begin, end, factor, to, pitch);
  if (left == 1) add_tile(vectors, 1, weights, values, begin, end, factor, to, pitch);
}

static __attribute__((noinline)) void add_values(const struct panel *p, struct tokens *block, int begin, int end,
                                                 const float *weights, const float *factor) {
  int d = 0;
  for (; d + VECTORS * WIDTH <= block->value_floats; d += VECTORS * WIDTH)
    add_channels(VECTORS, p, block, d, begin, end, weights, factor);
  if (d < block->value_floats) add_channels(2, p, block, d, begin, end, weights, factor);
}

/* The same sums where a value is infinite or NaN, and some rows do not see all tokens: what is not seen is left out,
 * for 0 times it would be NaN. */
static void add_seen_values(const struct panel *p, const struct tokens *block, int begin, int end, const float *weights,
                            const float *factor) {
  for (int r = 0; r < p->rows; ++r)
    for (int d = 0; d < block->value_floats; d += WIDTH) {
      const float *values = block->values + (int64_t)(d / SEGMENT) * PACKED + d % SEGMENT;
      float *to = p->numerator + (int64_t)r * block->value_floats + d;
      vector sum = splat(0.0f);
      for (int t = begin; t < end; ++t)
        if (p->seen[r] >> t & 1) sum = multiply_add(load(values + t * SEGMENT), splat(weights[t * PANEL + r]), sum);
      store(to, multiply_add(load(to), splat(factor[r]), sum));
    }
}

static int are_finite(const struct tokens *block) {
  vector strange = splat(0.0f);
  for (int d = 0; d < block->value_floats; d += WIDTH)
    for (int t = 0; t < BLOCK; ++t) {
      const float *values = block->values + (int64_t)(d / SEGMENT) * PACKED + d % SEGMENT;
      strange += load(values + t * SEGMENT) * 0.0f;
    }
  return sum_lanes(strange) == 0.0f;
}

/* Of the block's tokens, rows see what `seen` says. scores: [BLOCK][PANEL], overwritten. */
static void attend_panel(const struct panel *p, struct tokens *block, float *scores) {
  uint64_t any = 0, all = ~UINT64_C(0);
  for (int r = 0; r < p->rows; ++r) any |= p->seen[r], all &= p->seen[r];
  if (!any) return;
  _Alignas(64) float factor[PANEL];
  const int begin = __builtin_ctzll(any), end = 64 - __builtin_clzll(any), vectors = (p->rows + WIDTH - 1) / WIDTH;
  const int masked = all >> begin != ~UINT64_C(0) >> (64 - (end - begin));
  score_panel(p, block, vectors, begin, end, scores);
  shape_scores(p, block, vectors, begin, end, masked, scores);
  weigh_panel(p, vectors, begin, end, scores, factor);
  if (masked && !are_finite(block))
    add_seen_values(p, block, begin, end, scores, factor);
  else
    add_values(p, block, begin, end, scores, factor);
}

#endif
