/* Rows attend to one block of tokens that is a whole of its own: its weights and weighted values are summed in float32
 * in the order of its tokens, and each of these sums is one addend of a record. */
#ifndef TREEATTN_ATTEND_WHOLE_BLOCKS_H
#define TREEATTN_ATTEND_WHOLE_BLOCKS_H

#include "attend_bins.h"

enum { BLOCK_BITS = 5, LOWEST_WEIGHT = -100, MOST_FLOATS = 592, FLOATS = WIDTH == 16 ? 4 : 2 };

/* Weights relative to the block's largest power of two, which float32 holds exactly, and 0 where there is none; returns
 * their sum. */
static float relative_weights(struct weights *w, int32_t most, uint32_t bits) {
  float total = 0;
  for (int t = 0; t < BINS_BLOCK; ++t) {
    const int32_t power = w->e[t] - most;
    w->m[t] = most >= SPOILED || w->e[t] <= EMPTY || power < LOWEST_WEIGHT
                  ? 0.0f
                  : float_from_bits(bits_from_float(w->m[t]) + ((uint32_t)power << 23));
  }
  for (uint32_t left = bits; left; left &= left - 1) total += w->m[__builtin_ctz(left)];
  return total;
}

/* `count` vectors of sums of values from element d on. */
INLINE void sum_values(enum element_type type, int rows, int count, const struct bins_block *b, uint32_t bits,
                       const struct weights *w, int64_t d, float (*sums)[MOST_FLOATS]) {
  const int64_t size = (int64_t)element_size(type);
  vector sum[ROWS_TOGETHER][FLOATS];
  for (int r = 0; r < rows; ++r)
    for (int i = 0; i < count; ++i) sum[r][i] = splat(0.0f);
  for (uint32_t left = bits; left; left &= left - 1) {
    const int t = __builtin_ctz(left);
    const char *from = b->v + b->v_rows[t] + d * size;
    for (int i = 0; i < count * WIDTH * size; i += 64)
      __builtin_prefetch(b->v + b->next_v + t * b->v_share + d * size + i, 0, 2);
    vector x[FLOATS];
    for (int i = 0; i < count; ++i)
      x[i] = count > 1 ? load_ordered(type, from + i * WIDTH * size) : load_first(type, from, b->v_dim - d);
    for (int r = 0; r < rows; ++r)
      for (int i = 0; i < count; ++i) sum[r][i] = fuse(splat(w[r].m[t]), x[i], sum[r][i]);
  }
  for (int r = 0; r < rows; ++r)
    for (int i = 0; i < count; ++i) store(sums[r] + d + i * WIDTH, sum[r][i]);
}

typedef void sum_function(const struct bins_block *b, uint32_t bits, const struct weights *w,
                          float (*sums)[MOST_FLOATS]);
INLINE void sum_all_values(enum element_type type, int rows, const struct bins_block *b, uint32_t bits,
                           const struct weights *w, float (*sums)[MOST_FLOATS]) {
  int64_t d = 0;
  for (; d + FLOATS * WIDTH <= b->v_dim; d += FLOATS * WIDTH) sum_values(type, rows, FLOATS, b, bits, w, d, sums);
  for (; d < b->v_dim; d += WIDTH) sum_values(type, rows, 1, b, bits, w, d, sums);
}
#define SUM(TYPE, ROWS)                                                                                                \
  static void sum_##TYPE##_##ROWS(const struct bins_block *b, uint32_t bits, const struct weights *w,                  \
                                  float (*sums)[MOST_FLOATS]) {                                                        \
    sum_all_values(TYPE, ROWS, b, bits, w, sums);                                                                      \
  }
#define SUM_ALL(TYPE) SUM(TYPE, 1) SUM(TYPE, 2) SUM(TYPE, 3) SUM(TYPE, 4)
FOR_TYPES(SUM_ALL)
#define SUM_NAMES(TYPE) {sum_##TYPE##_1, sum_##TYPE##_2, sum_##TYPE##_3, sum_##TYPE##_4}
static sum_function *const sum_rows[5][ROWS_TOGETHER] = {SUM_NAMES(FLOAT32), SUM_NAMES(FLOAT16), SUM_NAMES(BFLOAT16),
                                                         SUM_NAMES(E4M3FN), SUM_NAMES(E5M2)};

/* The sums of a row to its record. */
static void add_block_sums(const struct bins_block *b, int32_t most, float total, const float *sums, int64_t *record) {
  vector_bits largest = {0};
  for (int64_t d = 0; d < b->v_dim; d += WIDTH)
    largest =
        larger_bits(largest, (vector_bits)load_first(FLOAT32, (const char *)(sums + d), b->v_dim - d) & 0x7fffffffu);
  const int32_t value = scaled_exponent(largest_bits(largest), b->v_scale);
  struct exponents x = exponents_of(record);
  x.weight = higher(x.weight, most >= SPOILED || most <= EMPTY ? most : most + BLOCK_BITS);
  x.value = higher(x.value, value >= SPOILED ? SPOILED : value - BLOCK_BITS);
  raise_record(record, b->v_dim, x);
  if (x.weight >= SPOILED || most <= EMPTY) return;
  uint64_t *to = (uint64_t *)record + BINS_DENOMINATOR;
  words upper = {0}, lower = {0};
  add_slices((doubles){ldexp((double)total, most - (int)(STEP * top_of_weights(x)))}, &upper, &lower);
  add_lanes(upper, lower, to);
  if (x.value >= SPOILED) return;
  to += BINS_NUMERATOR - BINS_DENOMINATOR;
  const int64_t apart = most - STEP * top_of_products(x);
  const doubles unit = splat_double(ldexp(1.0, (int)(apart < -800 ? -800 : apart))), scale = splat_double(b->v_scale);
  for (int64_t d = 0; d < b->v_dim; d += DOUBLES, to += DOUBLES) {
    memcpy(&upper, to, sizeof upper), memcpy(&lower, to + b->v_dim, sizeof lower);
    add_slices(unit * (scale * load_widened(FLOAT32, (const char *)(sums + d))), &upper, &lower);
    memcpy(to, &upper, sizeof upper), memcpy(to + b->v_dim, &lower, sizeof lower);
  }
}

/* Rows attend to a block as a whole. */
static void attend_whole(int type, const struct bins_block *b, const struct bins_rows *g) {
  _Alignas(64) float scores[ROWS_TOGETHER][BINS_BLOCK], sums[ROWS_TOGETHER][MOST_FLOATS];
  struct weights w[ROWS_TOGETHER];
  int32_t most[ROWS_TOGETHER];
  float total[ROWS_TOGETHER];
  score_rows[type][g->rows - 1](b, g->q, scores);
  for (int r = 0; r < g->rows; ++r) {
    most[r] = weigh_row(b, g, r, scores[r], w + r);
    total[r] = relative_weights(w + r, most[r], g->bits);
  }
  sum_rows[type][g->rows - 1](b, g->bits, w, sums);
  for (int r = 0; r < g->rows; ++r) add_block_sums(b, most[r], total[r], sums[r], g->records[r]);
}

#endif
