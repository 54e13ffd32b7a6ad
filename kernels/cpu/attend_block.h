/* A few query rows attend to one block of tokens: scores, online softmax, weighted sum of values, all in registers.
 *
 * Rows that share a KV head go through together, so that each key and value is loaded once for up to MAX_ROWS of
 * them. A block is summed on its own before it is added to what was summed before: short sums are accurate. */
#ifndef TREEATTN_ATTEND_BLOCK_H
#define TREEATTN_ATTEND_BLOCK_H

#include "adjust_scores.h"

enum { MAX_ROWS = 4, MAX_UNITS = 4 };

/* Where the tokens of a block lie, and so how memory is read; which is faster depends on the processor.
 * SCATTERED: far apart, as many streams as tokens, each prefetched where it goes on. Cores that follow many streams
 * read faster from many than from one.
 * NEIGHBOURS: side by side. What comes next is prefetched line by line in the order of memory, whichever lines are
 * being read, and into the second cache: a token's heads are often 4096 bytes, and then all tokens of a block fall
 * into one set of the first. Cores that follow few streams stand still otherwise. */
enum order { SCATTERED = 0, NEIGHBOURS = 1 };

/* Rows that attend to one block of tokens of one KV head. */
struct block {
  const char *k, *v;             /* the first token's row */
  int64_t k_rows[BLOCK];         /* how far from there each token's is: 0, ..; a short block repeats the last */
  int64_t v_rows[BLOCK];         /* the same */
  int in_row;                    /* whether the rows lie one after the other */
  int64_t k_step, v_step;        /* then from each to the next */
  int64_t next_k, next_v;        /* bytes to the block that comes after this one: prefetched meanwhile */
  int64_t k_share, v_share;      /* bytes from one token's share of that to the next token's; NEIGHBOURS only */
  int tokens;                    /* 1..BLOCK */
  int head_dim, row_floats;      /* row_floats: head_dim rounded up to whole units */
  const float *q;                /* [rows][row_floats], scaled, in unit order */
  float *numerator;              /* [rows][row_floats], in unit order */
  float *maximum;                /* [rows] */
  float *denominator;            /* [rows][WIDTH]: sums by lane */
  struct adjustment *adjustment; /* NULL: scores stay as they are */
};

/* Called wherever a unit is read, with a place that comes later, and how far into a row that is. One by one: a core can
 * wait for few lines of memory at a time, and stands still when more are asked for at once. Units of 8-bit elements are
 * parts of a line, which is asked for once. */
INLINE void prefetch_unit(enum order order, enum element_type type, const char *at, int64_t offset) {
  if (type > BFLOAT16 && offset % 64) return;
  for (size_t i = 0; i < UNIT * element_size(type); i += 64)
    if (order == SCATTERED)
      __builtin_prefetch(at + i);
    else
      __builtin_prefetch(at + i, 0, 2);
}

/* Keys scored together: as many rows x tokens as fill one sum_each(), or two where vectors are short. Neighbours that
 * may fall into one set of the cache: fewer. */
INLINE int tokens_together(enum order order, int rows) {
  const int sums = WIDTH < 8 ? 2 * WIDTH : WIDTH;
  if (order == NEIGHBOURS && sums / rows > 4) return 4;
  return rows == 1 ? sums : rows == 2 ? sums / 2 : sums / 4;
}

INLINE void add_products(int rows, int tokens, const float *q, int64_t q_stride, const unit *key,
                         vector (*sum)[BLOCK]) {
  for (int r = 0; r < rows; ++r) {
    const vector first = load(q + r * q_stride), second = load(q + r * q_stride + WIDTH);
    for (int t = 0; t < tokens; ++t) sum[r][t] = multiply_add(key[t].first, first, sum[r][t]);
    for (int t = 0; t < tokens; ++t) sum[r][t] = multiply_add(key[t].second, second, sum[r][t]);
  }
}

/* scores[row][t] = q[row] . key[t] for a few tokens, from token `begin` on. */
INLINE void score_tokens(enum order order, enum element_type type, int rows, int in_row, const struct block *b,
                         int begin, float (*scores)[BLOCK]) {
  const int tokens = tokens_together(order, rows), size = (int)element_size(type);
  const char *keys[BLOCK];
  for (int t = 0; t < tokens; ++t) {
    const int known = begin + t < b->tokens ? begin + t : b->tokens - 1;
    keys[t] = b->k + (in_row ? known * b->k_step : b->k_rows[begin + t]);
  }
  vector sum[MAX_ROWS][BLOCK];
  unit key[BLOCK];
  for (int r = 0; r < rows; ++r)
    for (int t = 0; t < tokens; ++t) sum[r][t] = splat(0.0f);
  int d = 0;
  for (; d + UNIT <= b->head_dim; d += UNIT) {
    for (int t = 0; t < tokens; ++t) {
      key[t] = load_unit(type, keys[t] + d * size);
      const char *next = order == SCATTERED ? keys[t] : b->k + (begin + t) * b->k_share;
      prefetch_unit(order, type, next + b->next_k + d * size, d * size);
    }
    add_products(rows, tokens, b->q + d, b->row_floats, key, sum);
  }
  if (d < b->head_dim) {
    for (int t = 0; t < tokens; ++t) key[t] = load_part(type, keys[t] + d * size, b->head_dim - d);
    add_products(rows, tokens, b->q + d, b->row_floats, key, sum);
  }
  vector flat[MAX_ROWS * BLOCK];
  const int count = rows * tokens, whole = (count + WIDTH - 1) / WIDTH * WIDTH;
  for (int i = 0; i < whole; ++i) flat[i] = i < count ? sum[i / tokens][i % tokens] : splat(0.0f);
  float result[MAX_ROWS * BLOCK];
  for (int i = 0; i < whole; i += WIDTH) store(result + i, sum_each(flat + i));
  for (int r = 0; r < rows; ++r) memcpy(scores[r] + begin, result + r * tokens, (size_t)tokens * sizeof(float));
}

/* Whole groups of tokens always: drop_scores() drops what came of keys that a short block repeats. */
INLINE void score_block(enum order order, enum element_type type, int rows, int in_row, const struct block *b,
                        float (*scores)[BLOCK]) {
  const int tokens = tokens_together(order, rows);
  for (int begin = 0; begin < BLOCK; begin += tokens) score_tokens(order, type, rows, in_row, b, begin, scores);
}

INLINE void drop_scores(int rows, const struct block *b, float (*scores)[BLOCK]) {
  for (int r = 0; r < rows; ++r)
    for (int i = b->tokens; i < BLOCK; ++i) scores[r][i] = -INFINITY;
}

/* The maximum rises to the largest of the block's scores, if that is larger. Returns the factor for what was summed
 * before. Seldom needed, hence the test first: after n blocks of random scores the chance is 1 / n. */
INLINE float raise_maximum(const vector *score, float *maximum) {
  vector highest = score[0];
  for (int i = 1; i < BLOCK / WIDTH; ++i) highest = larger(score[i], highest);
  if (!any_greater(highest, splat(*maximum))) return 1.0f;
  const float before = *maximum;
  *maximum = largest_lane(highest);
  return exponential(before - *maximum);
}

/* Scores to weights exp(score - maximum), in place; their sums by lane go to the denominator. */
INLINE float weigh_block(float *scores, float *maximum, float *denominator) {
  vector score[BLOCK / WIDTH], sum = splat(0.0f);
  for (int i = 0; i < BLOCK / WIDTH; ++i) score[i] = load(scores + i * WIDTH);
  const float factor = raise_maximum(score, maximum);
  const vector base = splat(*maximum == -INFINITY ? 0.0f : *maximum); /* -inf - -inf would be NaN */
  for (int i = 0; i < BLOCK / WIDTH; ++i) {
    const vector weight = exponential_lanes(score[i] - base);
    store(scores + i * WIDTH, weight);
    sum += weight;
  }
  store(denominator, multiply_add(load(denominator), splat(factor), sum));
  return factor;
}

/* numerator = factor * numerator + weights . v, for `units` units from element d on. `in_row`: the loop is up to a
 * tenth faster where it need not look up each token's place. */
INLINE void add_units(enum order order, enum element_type type, int rows, int in_row, int units, int part,
                      const struct block *b, int d, float (*weights)[BLOCK], const float *factor) {
  vector sum[MAX_ROWS][2 * MAX_UNITS];
  for (int r = 0; r < rows; ++r)
    for (int u = 0; u < 2 * units; ++u) sum[r][u] = splat(0.0f);
  for (int t = 0; t < b->tokens; ++t) {
    const size_t at = (size_t)d * element_size(type);
    const char *from = b->v + (in_row ? t * b->v_step : b->v_rows[t]) + at;
    unit value[MAX_UNITS];
    const char *next = (order == SCATTERED ? from : b->v + t * b->v_share + at) + b->next_v;
    for (int u = 0; u < units; ++u) prefetch_unit(order, type, next + u * UNIT * element_size(type), d + u * UNIT);
    for (int u = 0; u < units; ++u)
      value[u] = part ? load_part(type, from, part) : load_unit(type, from + u * UNIT * element_size(type));
    for (int r = 0; r < rows; ++r) {
      const vector weight = splat(weights[r][t]);
      for (int u = 0; u < units; ++u) {
        sum[r][2 * u] = multiply_add(value[u].first, weight, sum[r][2 * u]);
        sum[r][2 * u + 1] = multiply_add(value[u].second, weight, sum[r][2 * u + 1]);
      }
    }
  }
  for (int r = 0; r < rows; ++r)
    for (int u = 0; u < 2 * units; ++u) {
      float *to = b->numerator + (size_t)r * b->row_floats + d + u * WIDTH;
      store(to, multiply_add(load(to), splat(factor[r]), sum[r][u]));
    }
}

/* Units summed together: as many sums as registers hold beside a unit and a weight, the half of them. */
INLINE int units_together(int rows) {
  const int sums = REGISTERS / 2;
  return rows == 1 ? MAX_UNITS : rows == 2 ? sums / 4 : sums / 8;
}

INLINE void add_values(enum order order, enum element_type type, int rows, int in_row, const struct block *b,
                       float (*weights)[BLOCK], const float *factor) {
  const int together = units_together(rows);
  int d = 0;
  if (together >= 4)
    for (; d + 4 * UNIT <= b->head_dim; d += 4 * UNIT)
      add_units(order, type, rows, in_row, 4, 0, b, d, weights, factor);
  if (together >= 2)
    for (; d + 2 * UNIT <= b->head_dim; d += 2 * UNIT)
      add_units(order, type, rows, in_row, 2, 0, b, d, weights, factor);
  for (; d + UNIT <= b->head_dim; d += UNIT) add_units(order, type, rows, in_row, 1, 0, b, d, weights, factor);
  if (d < b->head_dim) add_units(order, type, rows, in_row, 1, b->head_dim - d, b, d, weights, factor);
}

INLINE void attend_placed(enum order order, enum element_type type, int rows, int in_row, const struct block *b) {
  _Alignas(64) float scores[MAX_ROWS][BLOCK];
  float factor[MAX_ROWS];
  score_block(order, type, rows, in_row, b, scores);
  if (b->adjustment) adjust_scores(b->adjustment, rows, scores);
  drop_scores(rows, b, scores);
  for (int r = 0; r < rows; ++r) factor[r] = weigh_block(scores[r], b->maximum + r, b->denominator + r * WIDTH);
  add_values(order, type, rows, in_row, b, scores, factor);
}

/* Tokens in a row have loops of their own: they are up to a tenth faster than those that look up each token's place. */
INLINE void attend(enum order order, enum element_type type, int rows, const struct block *b) {
  if (b->in_row)
    attend_placed(order, type, rows, 1, b);
  else
    attend_placed(order, type, rows, 0, b);
}

/* One compiled function for each order, type and number of rows: the compiler unrolls and keeps sums in registers. */
typedef void attend_function(const struct block *b);
#define ATTEND(ORDER, TYPE, ROWS)                                                                                      \
  static void attend_##ORDER##_##TYPE##_##ROWS(const struct block *b) { attend(ORDER, TYPE, ROWS, b); }
#define ATTEND_ROWS(ORDER, TYPE)                                                                                       \
  ATTEND(ORDER, TYPE, 1) ATTEND(ORDER, TYPE, 2) ATTEND(ORDER, TYPE, 3) ATTEND(ORDER, TYPE, 4)
#define ATTEND_TYPES(ORDER)                                                                                            \
  ATTEND_ROWS(ORDER, FLOAT32)                                                                                          \
  ATTEND_ROWS(ORDER, FLOAT16)                                                                                          \
  ATTEND_ROWS(ORDER, BFLOAT16) ATTEND_ROWS(ORDER, E4M3FN) ATTEND_ROWS(ORDER, E5M2)
ATTEND_TYPES(SCATTERED)
ATTEND_TYPES(NEIGHBOURS)
#define NAMES(ORDER, TYPE)                                                                                             \
  {attend_##ORDER##_##TYPE##_1, attend_##ORDER##_##TYPE##_2, attend_##ORDER##_##TYPE##_3, attend_##ORDER##_##TYPE##_4}
#define TYPES(ORDER)                                                                                                   \
  {NAMES(ORDER, FLOAT32), NAMES(ORDER, FLOAT16), NAMES(ORDER, BFLOAT16), NAMES(ORDER, E4M3FN), NAMES(ORDER, E5M2)}
static attend_function *const attend_rows[2][5][MAX_ROWS] = {TYPES(SCATTERED), TYPES(NEIGHBOURS)};

#endif
