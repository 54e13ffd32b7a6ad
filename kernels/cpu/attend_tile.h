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
  PANEL = 48,              /* rows */
  BLOCK = 48,              /* tokens; whole tiles of either */
  TILE = 6,                /* rows whose values are summed together */
  VECTORS = REGISTERS / 8, /* summed together for each of TILE */
  SUMS = TILE * VECTORS,
  SEGMENT = 64, /* channels that are packed together */
};

/* Up to PANEL rows. Lanes without a row hold q = 0 and are never written out. */
struct panel {
  int rows;
  int share, shares;             /* this is the share-th panel that looks at a block, of so many */
  const float *q;                /* [key_floats][PANEL], scaled, channels in unit order */
  float *numerator;              /* [rows][value_floats], in unit order */
  float *maximum, *denominator;  /* [PANEL] */
  const float *slope, *distance; /* [PANEL]: ALiBi, and how far the block's first token lies before the query */
  const uint64_t *seen;          /* [PANEL]: bit t: whether the row sees token t of the block */
};

/* Rows of the block that is packed next, one for each of BLOCK tokens. */
struct coming {
  const char *from; /* NULL: nothing */
  int64_t stride, bytes;
};

/* Tokens packed as [segments][BLOCK][SEGMENT] of float32, 0 where nobody sees a token. */
struct tokens {
  const float *keys, *values;
  int key_floats, value_floats;         /* channels rounded up to whole units */
  struct coming next_keys, next_values; /* prefetched meanwhile */
  const float *offset;                  /* [BLOCK]: position, from that of the block's first token on; NULL: no ALiBi */
  float softcap;                        /* 0: none */
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

/* One compiled function for each number of vectors and rows: the compiler unrolls and keeps sums in registers. */
typedef void score_function(const float *q, const float *key, int channels, int add, float *scores);
#define SCORE(VECTORS_USED, TOKENS)                                                                                    \
  static void score_##VECTORS_USED(const float *q, const float *key, int channels, int add, float *scores) {           \
    score_tile(VECTORS_USED, TOKENS, q, key, channels, add, scores);                                                   \
  }
typedef void add_function(const float *weights, const float *values, int begin, int end, const float *factor,
                          float *numerator, int64_t pitch);
#define ADD(VECTORS_USED, ROWS)                                                                                        \
  static void add_##VECTORS_USED##_##ROWS(const float *weights, const float *values, int begin, int end,               \
                                          const float *factor, float *numerator, int64_t pitch) {                      \
    add_tile(VECTORS_USED, ROWS, weights, values, begin, end, factor, numerator, pitch);                               \
  }
#define ADD_ROWS(V) ADD(V, 1) ADD(V, 2) ADD(V, 3) ADD(V, 4) ADD(V, 5) ADD(V, 6)
#define ADD_NAMES(V) {add_##V##_1, add_##V##_2, add_##V##_3, add_##V##_4, add_##V##_5, add_##V##_6}

ADD_ROWS(2)
static add_function *const add_unit[TILE] = ADD_NAMES(2);
#if REGISTERS == 32
SCORE(1, 12)
SCORE(2, 12)
SCORE(3, 8)
SCORE(4, 6) ADD_ROWS(4) static score_function *const score_vectors[VECTORS] = {score_1, score_2, score_3, score_4};
static const int tokens_scored[VECTORS] = {12, 12, 8, 6};
static add_function *const add_units[TILE] = ADD_NAMES(4);
#else
SCORE(1, 12) SCORE(2, 6) static score_function *const score_vectors[VECTORS] = {score_1, score_2};
static const int tokens_scored[VECTORS] = {12, 6};
static add_function *const *const add_units = add_unit;
#endif

INLINE void prefetch_rows(const struct coming *next, int part, int parts, int begin, int end) {
  const int64_t lines = (next->bytes + 63) / 64;
  if (!next->from) return;
  for (int t = begin; t < end; ++t)
    for (int64_t line = part * lines / parts; line < (part + 1) * lines / parts; ++line)
      __builtin_prefetch(next->from + t * next->stride + line * 64, 0, 2);
}

/* The part-th of `parts` equal parts of the coming rows begin..end, into the second cache. Few lines at a time: a core
 * stands still when it waits for many. */
static void prefetch_part(const struct tokens *block, int part, int parts, int begin, int end) {
  prefetch_rows(&block->next_keys, part, parts, begin, end);
  prefetch_rows(&block->next_values, part, parts, begin, end);
}

static void score_panel(const struct panel *p, const struct tokens *block, int vectors, int begin, int end,
                        float *scores) {
  const int segments = (block->key_floats + SEGMENT - 1) / SEGMENT;
  for (int i = 0; i < segments; ++i) {
    const int left = block->key_floats - i * SEGMENT, channels = left < SEGMENT ? left : SEGMENT;
    const float *keys = block->keys + i * SEGMENT * BLOCK, *q = p->q + i * SEGMENT * PANEL;
    for (int u = 0, together; u < vectors; u += together) {
      together = vectors - u < VECTORS ? vectors - u : VECTORS;
      const int tokens = tokens_scored[together - 1];
      for (int t = begin / tokens * tokens; t < end; t += tokens) {
        score_vectors[together - 1](q + u * WIDTH, keys + t * SEGMENT, channels, i, scores + t * PANEL + u * WIDTH);
        if (u == 0) prefetch_part(block, p->share * segments + i, p->shares * segments, t, t + tokens);
      }
    }
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
static void weigh_panel(const struct panel *p, int vectors, int begin, int end, float *scores, float *factor) {
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

static void add_values(const struct panel *p, const struct tokens *block, int begin, int end, const float *weights,
                       const float *factor) {
  for (int d = 0, step; d < block->value_floats; d += step) {
    step = block->value_floats - d < VECTORS * WIDTH ? UNIT : VECTORS * WIDTH;
    const float *values = block->values + (int64_t)(d / SEGMENT) * BLOCK * SEGMENT + d % SEGMENT;
    for (int r = 0, rows; r < p->rows; r += rows) {
      rows = p->rows - r < TILE ? p->rows - r : TILE;
      (step == UNIT ? add_unit : add_units)[rows - 1](weights + r, values, begin, end, factor + r,
                                                      p->numerator + (int64_t)r * block->value_floats + d,
                                                      block->value_floats);
    }
  }
}

/* The same sums where a value is infinite or NaN, and some rows do not see all tokens: what is not seen is left out,
 * for 0 times it would be NaN. */
static void add_seen_values(const struct panel *p, const struct tokens *block, int begin, int end, const float *weights,
                            const float *factor) {
  for (int r = 0; r < p->rows; ++r)
    for (int d = 0; d < block->value_floats; d += WIDTH) {
      const float *values = block->values + (int64_t)(d / SEGMENT) * BLOCK * SEGMENT + d % SEGMENT;
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
      const float *values = block->values + (int64_t)(d / SEGMENT) * BLOCK * SEGMENT + d % SEGMENT;
      strange += load(values + t * SEGMENT) * 0.0f;
    }
  return sum_lanes(strange) == 0.0f;
}

/* Of the block's tokens, rows see what `seen` says. scores: [BLOCK][PANEL], overwritten. */
static void attend_panel(const struct panel *p, const struct tokens *block, float *scores) {
  uint64_t any = 0, all = ~UINT64_C(0);
  for (int r = 0; r < p->rows; ++r) any |= p->seen[r], all &= p->seen[r];
  if (!any) return;
  _Alignas(64) float factor[PANEL];
  const int begin = __builtin_ctzll(any), end = 64 - __builtin_clzll(any), vectors = (p->rows + WIDTH - 1) / WIDTH;
  const int masked = all >> begin != ~UINT64_C(0) >> (64 - (end - begin));
  score_panel(p, block, vectors, begin, end, scores);
  shape_scores(p, block, vectors, begin, end, masked, scores);
  weigh_panel(p, vectors, begin, end, scores, factor);
  (masked && !are_finite(block) ? add_seen_values : add_values)(p, block, begin, end, scores, factor);
}

#endif
