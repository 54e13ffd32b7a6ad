/* Rows attend to one block of tokens, into records of bins.h: each token by itself, so that order does not matter.
 *
 * A weight is a float64 in units of the upper bin. Adding a product with it to a number whose last place is that unit
 * rounds it to a whole one, and the mantissa is the whole number: R = ROUND_UPPER, S = ROUND_LOWER,
 *     t = fma(weight, value, R),            upper += bits(t)
 *     t' = fma(weight, value, (R + S) - t), lower += bits(t')
 * less bits(R) and bits(S) for each token. As these are constants, where ties go does not depend on other tokens. */
#ifndef TREEATTN_ATTEND_BINS_H
#define TREEATTN_ATTEND_BINS_H

#include "bins.h"
#include "exact_lanes.h"
#include "exponential_float64.h"

enum { BINS_BLOCK = 32, LANES = 16, ROWS_TOGETHER = 4, VECTORS_OF_LANES = LANES / WIDTH };
enum { SUMS = WIDTH == 16 ? 8 : 4, SLICE = SUMS * DOUBLES }; /* vectors of each bin that stay in registers */
#define ROUND_UPPER 0x1.8p52
#define ROUND_LOWER 0x1.8p11 /* 1.5 * 2^(52 - STEP) */
#define LARGEST_LOGIT 1048576.0

/* Tokens of one KV head. Where some row sees a token, its rows are read, else those of another. */
struct bins_block {
  int64_t k_rows[BINS_BLOCK], v_rows[BINS_BLOCK]; /* addresses as bytes from k and v */
  const char *k, *v;
  int64_t next_k, next_v, k_share,
      v_share;                         /* what is prefetched meanwhile: from token 0's row on, and between tokens */
  int tokens;                          /* 1..BINS_BLOCK */
  uint32_t seen;                       /* by some row */
  int64_t head_dim, v_dim, row_floats; /* row_floats: head_dim rounded up to whole LANES */
  double v_scale;                      /* what values are multiplied with */
  float softcap;                       /* 0: none */
  int alibi;
  double position[BINS_BLOCK]; /* where alibi */
};

/* Neighbouring rows that see the same tokens. */
struct bins_rows {
  int rows;
  uint32_t bits;
  const float *q; /* [rows][row_floats], scaled */
  int64_t *records[ROWS_TOGETHER];
  double slope[ROWS_TOGETHER], time[ROWS_TOGETHER];
};

/* Element d of a product goes to lane d % 16, in ascending order; lanes are folded 8, 4, 2 and 1 apart. */
INLINE void score_exactly(enum element_type type, int rows, const struct bins_block *b, const float *q,
                          float (*scores)[BINS_BLOCK]) {
  enum { TOGETHER = 4 };
  const int size = (int)element_size(type), together = rows > 1 && VECTORS_OF_LANES > 1 ? 1 : TOGETHER;
  vector folded[ROWS_TOGETHER][BINS_BLOCK];
  for (int t0 = 0; t0 < BINS_BLOCK; t0 += together) {
    vector sum[ROWS_TOGETHER][TOGETHER][VECTORS_OF_LANES];
    const char *key[TOGETHER];
    for (int t = 0; t < together; ++t) key[t] = b->k + b->k_rows[t0 + t];
    for (int r = 0; r < rows; ++r)
      for (int t = 0; t < together; ++t)
        for (int i = 0; i < VECTORS_OF_LANES; ++i) sum[r][t][i] = splat(0.0f);
    int64_t d = 0;
    for (; d + LANES <= b->head_dim; d += LANES) {
      for (int t = 0; t < together; ++t)
        if (d * size % 64 == 0) __builtin_prefetch(b->k + b->next_k + (t0 + t) * b->k_share + d * size, 0, 2);
      for (int i = 0; i < VECTORS_OF_LANES; ++i)
        for (int t = 0; t < together; ++t) {
          const vector x = load_ordered(type, key[t] + (d + i * WIDTH) * size);
          for (int r = 0; r < rows; ++r)
            sum[r][t][i] = fuse(x, load(q + r * b->row_floats + d + i * WIDTH), sum[r][t][i]);
        }
    }
    for (int i = 0; i < VECTORS_OF_LANES && d + i * WIDTH < b->head_dim; ++i)
      for (int t = 0; t < together; ++t) {
        const int64_t at = d + i * WIDTH;
        const vector x = load_first(type, key[t] + at * size, b->head_dim - at);
        for (int r = 0; r < rows; ++r) sum[r][t][i] = fuse(x, load(q + r * b->row_floats + at), sum[r][t][i]);
      }
    for (int r = 0; r < rows; ++r)
      for (int t = 0; t < together; ++t) {
        vector *s = sum[r][t];
        if (VECTORS_OF_LANES == 4) s[0] += s[2 % VECTORS_OF_LANES], s[1 % VECTORS_OF_LANES] += s[3 % VECTORS_OF_LANES];
        if (VECTORS_OF_LANES >= 2) s[0] += s[1 % VECTORS_OF_LANES];
        folded[r][t0 + t] = s[0];
      }
  }
  for (int r = 0; r < rows; ++r)
    for (int t = 0; t < BINS_BLOCK; t += WIDTH) store(scores[r] + t, sum_by_halves(folded[r] + t));
}

/* One compiled function for each type and number of rows. */
typedef void score_function(const struct bins_block *b, const float *q, float (*scores)[BINS_BLOCK]);
#define SCORE(TYPE, ROWS)                                                                                              \
  static void score_##TYPE##_##ROWS(const struct bins_block *b, const float *q, float (*scores)[BINS_BLOCK]) {         \
    score_exactly(TYPE, ROWS, b, q, scores);                                                                           \
  }
#define SCORES(TYPE) SCORE(TYPE, 1) SCORE(TYPE, 2) SCORE(TYPE, 3) SCORE(TYPE, 4)
FOR_TYPES(SCORES)
#define SCORE_NAMES(TYPE) {score_##TYPE##_1, score_##TYPE##_2, score_##TYPE##_3, score_##TYPE##_4}
static score_function *const score_rows[5][ROWS_TOGETHER] = {
    SCORE_NAMES(FLOAT32), SCORE_NAMES(FLOAT16), SCORE_NAMES(BFLOAT16), SCORE_NAMES(E4M3FN), SCORE_NAMES(E5M2)};

/* A row's weights: exp(logit) = m 2^e with m in 0.7 .. 1.42; e is EMPTY for -inf. */
struct weights {
  _Alignas(64) float m[BINS_BLOCK];
  _Alignas(64) int32_t e[BINS_BLOCK];
  _Alignas(64) double of_values[BINS_BLOCK]; /* in units of the upper bin */
  uint32_t both, low;                        /* tokens with slices in both bins, and in the lower alone */
};

INLINE vector mantissas(vector fraction) {
  vector value = splat(exp_polynomial[0]);
  for (int i = 1; i <= EXP_DEGREE; ++i) value = fuse(value, fraction, splat(exp_polynomial[i]));
  return value;
}

/* The largest e, or SPOILED, or EMPTY. */
INLINE int32_t weigh(const float *scores, struct weights *w) {
  const float limit = (float)LARGEST_LOGIT;
  vector_int sound = ~(vector_int){0}, most = (vector_int){0} + EMPTY;
  for (int t = 0; t < BINS_BLOCK; t += WIDTH) {
    const vector score = load(scores + t), x = -larger(-larger(score, splat(-limit)), splat(-limit));
    const vector shifted = fuse(x, splat(EXP_LOG2_E), splat(EXP_ROUND_TO_INTEGER));
    const vector power = shifted - EXP_ROUND_TO_INTEGER;
    const vector fraction = fuse(power, splat(-EXP_LN2_LOW), fuse(power, splat(-EXP_LN2_HIGH), x));
    store(w->m + t, mantissas(fraction));
    const vector_int seen = score > -INFINITY,
                     e = (((vector_int)shifted - (int32_t)0x4b400000) & seen) | (EMPTY & ~seen);
    store((float *)(w->e + t), (vector)e);
    sound &= score < INFINITY;
    most = (vector_int)(((vector_bits)e & (vector_bits)(e > most)) | ((vector_bits)most & ~(vector_bits)(e > most)));
  }
  int32_t highest = EMPTY;
  for (int i = 0; i < WIDTH; ++i) {
    if (!sound[i]) return SPOILED;
    highest = higher(highest, most[i]);
  }
  return highest;
}

INLINE int32_t weigh_visible(float *scores, uint32_t bits, struct weights *w) {
  if (bits != 0xffffffffu)
    for (int t = 0; t < BINS_BLOCK; ++t) scores[t] = bits >> t & 1 ? scores[t] : -INFINITY;
  return weigh(scores, w);
}

/* The same of what a soft cap and ALiBi make of the scores, in float64. */
static int32_t weigh_adjusted(const struct bins_block *b, const float *scores, uint32_t bits, double slope, double time,
                              struct weights *w) {
  _Alignas(64) float fraction[BINS_BLOCK];
  int32_t most = EMPTY;
  for (int t = 0; t < BINS_BLOCK; ++t) {
    double logit = scores[t];
    if (b->softcap > 0 && logit == logit) logit = soft_capped(logit, b->softcap);
    if (b->alibi) logit -= slope * (time - b->position[t]);
    if (!(bits >> t & 1)) logit = -INFINITY;
    const double limited = logit < -LARGEST_LOGIT ? -LARGEST_LOGIT : logit > LARGEST_LOGIT ? LARGEST_LOGIT : logit;
    double rest;
    const double power = reduce(limited, &rest);
    fraction[t] = (float)rest;
    w->e[t] = logit > -INFINITY ? (int32_t)power : EMPTY;
    if (!(logit < INFINITY)) most = SPOILED;
    most = higher(most, w->e[t]);
  }
  for (int t = 0; t < BINS_BLOCK; t += WIDTH) store(w->m + t, mantissas(load(fraction + t)));
  return most;
}

static int32_t weigh_row(const struct bins_block *b, const struct bins_rows *g, int r, float *scores,
                         struct weights *w) {
  if (b->softcap > 0 || b->alibi) return weigh_adjusted(b, scores, g->bits, g->slope[r], g->time[r], w);
  return weigh_visible(scores, g->bits, w);
}

/* m 2^(e - from), 0 where that is far down. */
INLINE doubles scaled_weights(const struct weights *w, int t, int64_t from) {
  typedef int32_t half __attribute__((vector_size(DOUBLES * 4)));
  typedef int64_t powers __attribute__((vector_size(DOUBLES * 8)));
  half e;
  memcpy(&e, w->e + t, sizeof e);
  const powers power = __builtin_convertvector(e, powers) - from, near = power > -800;
  return (doubles)(((words)load_widened(FLOAT32, (const char *)(w->m + t)) + ((words)power << 52)) & (words)near);
}

static inline uint64_t bits_of(double x) {
  uint64_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

/* Adds the slices of numbers in units of the upper bin. */
INLINE void add_slices(doubles x, words *upper, words *lower) {
  const doubles up = x + ROUND_UPPER, low = (x - (up - ROUND_UPPER)) + ROUND_LOWER;
  *upper += (words)up - bits_of(ROUND_UPPER);
  *lower += (words)low - bits_of(ROUND_LOWER);
}

INLINE void add_lanes(words upper, words lower, uint64_t *sums) {
  for (int i = 0; i < DOUBLES; ++i) sums[0] += upper[i], sums[1] += lower[i];
}

/* Values of a block: rows at `at` + rows[t], of which `ahead` + t * share is fetched meanwhile, `ahead_bytes` of each.
 */
struct values {
  const char *at;
  const int64_t *rows;
  const char *ahead;
  int64_t share, ahead_bytes;
};

/* `count` vectors of values, for one row; WIDENED: of float64. The constants get into the sums once for each token. */
enum { WIDENED = 5 };
INLINE doubles value_at(int type, const char *from, int i) {
  if (type == WIDENED) return load_numbers((const double *)from + i * DOUBLES);
  return load_widened((enum element_type)type, from + i * DOUBLES * (int)element_size((enum element_type)type));
}

INLINE void add_products_exactly(int type, int count, const struct values *v, const struct weights *w, uint64_t *upper,
                                 uint64_t *lower) {
  const doubles to_upper = splat_double(ROUND_UPPER), to_lower = splat_double(ROUND_LOWER);
  const doubles to_both = to_upper + to_lower;
  const uint64_t both = (uint64_t)__builtin_popcount(w->both), low = (uint64_t)__builtin_popcount(w->low);
  words up[SUMS], down[SUMS];
  for (int i = 0; i < count; ++i) {
    memcpy(&up[i], upper + i * DOUBLES, sizeof up[i]), memcpy(&down[i], lower + i * DOUBLES, sizeof down[i]);
    up[i] -= both * bits_of(ROUND_UPPER);
    down[i] -= (both + low) * bits_of(ROUND_LOWER);
  }
  for (uint32_t left = w->both; left; left &= left - 1) {
    const int t = __builtin_ctz(left);
    const char *from = v->at + v->rows[t];
    const doubles weight = splat_double(w->of_values[t]);
    for (int64_t i = 0; i < v->ahead_bytes; i += 64) __builtin_prefetch(v->ahead + t * v->share + i, 0, 2);
    for (int i = 0; i < count; ++i) {
      const doubles value = value_at(type, from, i), whole = fuse_doubles(weight, value, to_upper);
      up[i] += (words)whole;
      down[i] += (words)fuse_doubles(weight, value, to_both - whole);
    }
  }
  for (uint32_t left = w->low; left; left &= left - 1) {
    const int t = __builtin_ctz(left);
    const char *from = v->at + v->rows[t];
    const doubles weight = splat_double(w->of_values[t]);
    for (int64_t i = 0; i < v->ahead_bytes; i += 64) __builtin_prefetch(v->ahead + t * v->share + i, 0, 2);
    for (int i = 0; i < count; ++i) down[i] += (words)fuse_doubles(weight, value_at(type, from, i), to_lower);
  }
  for (int i = 0; i < count; ++i)
    memcpy(upper + i * DOUBLES, &up[i], sizeof up[i]), memcpy(lower + i * DOUBLES, &down[i], sizeof down[i]);
}

/* Functions of their own, for each type: what is inlined into more keeps fewer sums in registers. */
typedef void add_products_function(const struct values *v, const struct weights *w, uint64_t *upper, uint64_t *lower);
#define PRODUCTS(TYPE)                                                                                                 \
  static __attribute__((noinline)) void add_many_##TYPE(const struct values *v, const struct weights *w,               \
                                                        uint64_t *upper, uint64_t *lower) {                            \
    add_products_exactly(TYPE, SUMS, v, w, upper, lower);                                                              \
  }                                                                                                                    \
  static __attribute__((noinline)) void add_one_##TYPE(const struct values *v, const struct weights *w,                \
                                                       uint64_t *upper, uint64_t *lower) {                             \
    add_products_exactly(TYPE, 1, v, w, upper, lower);                                                                 \
  }
PRODUCTS(FLOAT32)
PRODUCTS(FLOAT16)
PRODUCTS(BFLOAT16)
PRODUCTS(WIDENED)
static add_products_function *const add_many[6] = {[FLOAT32] = add_many_FLOAT32,
                                                   [FLOAT16] = add_many_FLOAT16,
                                                   [BFLOAT16] = add_many_BFLOAT16,
                                                   [WIDENED] = add_many_WIDENED};
static add_products_function *const add_one[6] = {[FLOAT32] = add_one_FLOAT32,
                                                  [FLOAT16] = add_one_FLOAT16,
                                                  [BFLOAT16] = add_one_BFLOAT16,
                                                  [WIDENED] = add_one_WIDENED};

/* The exponent of a magnitude, given by its bits, times a scale. */
static int32_t scaled_exponent(uint32_t magnitude, double scale) {
  if (magnitude >> 23 == 255) return SPOILED;
  if (scale == 1) return (int32_t)(magnitude >> 23) - 127;
  int exponent;
  frexp(float_from_bits(magnitude) * scale, &exponent);
  return magnitude && exponent - 1 > -127 ? exponent - 1 : -127;
}

/* The exponent of the largest magnitude among the values of some tokens, times their scale. */
INLINE int32_t value_exponent(enum element_type type, const struct bins_block *b, uint32_t bits) {
  const int64_t size = (int64_t)element_size(type);
  vector_bits largest[4] = {{0}};
  for (uint32_t left = bits; left; left &= left - 1) {
    const char *from = b->v + b->v_rows[__builtin_ctz(left)];
    int64_t d = 0;
    for (; d + 4 * WIDTH <= b->v_dim; d += 4 * WIDTH)
      for (int i = 0; i < 4; ++i) {
        const vector x = load_ordered(type, from + (d + i * WIDTH) * size);
        largest[i] = larger_bits((vector_bits)x & 0x7fffffffu, largest[i]);
      }
    for (; d < b->v_dim; d += WIDTH) {
      const vector x = load_first(type, from + d * size, b->v_dim - d);
      largest[0] = larger_bits((vector_bits)x & 0x7fffffffu, largest[0]);
    }
  }
  const uint32_t most =
      largest_bits(larger_bits(larger_bits(largest[0], largest[1]), larger_bits(largest[2], largest[3])));
  return scaled_exponent(most, b->v_scale);
}

/* Bit t: whether e[t] > than. */
INLINE uint32_t greater(const int32_t *e, int64_t least) {
  const int32_t than = (int32_t)(least < INT32_MIN ? INT32_MIN : least > INT32_MAX ? INT32_MAX : least);
  uint32_t bits = 0;
#if SIMD_AVX512
  for (int t = 0; t < BINS_BLOCK; t += 16)
    bits |= (uint32_t)_mm512_cmpgt_epi32_mask(_mm512_load_si512(e + t), _mm512_set1_epi32(than)) << t;
#elif SIMD_AVX2
  for (int t = 0; t < BINS_BLOCK; t += 8) {
    const __m256i more = _mm256_cmpgt_epi32(_mm256_load_si256((const void *)(e + t)), _mm256_set1_epi32(than));
    bits |= (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(more)) << t;
  }
#else
  for (int t = 0; t < BINS_BLOCK; ++t) bits |= (uint32_t)(e[t] > than) << t;
#endif
  return bits;
}

/* A record is raised to what weights and values ask for, and the denominator added. */
static void add_weights(int32_t most, int32_t value, int64_t v_dim, struct weights *w, int64_t *record) {
  struct exponents x = exponents_of(record);
  x.weight = higher(x.weight, most), x.value = higher(x.value, value);
  raise_record(record, v_dim, x);
  w->both = w->low = 0;
  if (x.weight >= SPOILED || most == EMPTY) return;
  words upper = {0}, lower = {0};
  for (int t = 0; t < BINS_BLOCK; t += DOUBLES)
    add_slices(scaled_weights(w, t, STEP * top_of_weights(x)), &upper, &lower);
  add_lanes(upper, lower, (uint64_t *)record + BINS_DENOMINATOR);
  if (x.value >= SPOILED) return;
  const int64_t top = top_of_products(x), last_low = STEP * top - 1 - x.value - 2; /* |x| < 2^(e + value + 2) */
  for (int t = 0; t < BINS_BLOCK; t += DOUBLES) store_numbers(w->of_values + t, scaled_weights(w, t, STEP * top));
  w->both = greater(w->e, last_low);
  w->low = greater(w->e, last_low - STEP) & ~w->both;
}

/* Values of a block from element d on, times their scale, as [BINS_BLOCK][SLICE] of float64. */
INLINE void widen_values(enum element_type type, const struct bins_block *b, int64_t d, int count, double *wide) {
  const doubles scale = splat_double(b->v_scale);
  for (uint32_t left = b->seen; left; left &= left - 1) {
    const int t = __builtin_ctz(left);
    const char *from = b->v + b->v_rows[t] + d * (int64_t)element_size(type);
    for (int i = 0; i < count; ++i) {
      const doubles x = load_widened(type, from + i * DOUBLES * (int)element_size(type));
      store_numbers(wide + t * SLICE + i * DOUBLES, x * scale);
    }
  }
}

typedef void widen_function(const struct bins_block *b, int64_t d, int count, double *wide);
typedef int32_t value_exponent_function(const struct bins_block *b, uint32_t bits);
#define VALUES(TYPE)                                                                                                   \
  static void widen_##TYPE(const struct bins_block *b, int64_t d, int count, double *wide) {                           \
    widen_values(TYPE, b, d, count, wide);                                                                             \
  }                                                                                                                    \
  static int32_t value_exponent_##TYPE(const struct bins_block *b, uint32_t bits) {                                    \
    return value_exponent(TYPE, b, bits);                                                                              \
  }
FOR_TYPES(VALUES)
static widen_function *const widen[5] = {widen_FLOAT32, widen_FLOAT16, widen_BFLOAT16, widen_E4M3FN, widen_E5M2};
static value_exponent_function *const value_exponents[5] = {value_exponent_FLOAT32, value_exponent_FLOAT16,
                                                            value_exponent_BFLOAT16, value_exponent_E4M3FN,
                                                            value_exponent_E5M2};

/* Rows share what it takes to widen values; types that are slow to widen, and scaled ones, are widened first, too. */
static void add_all_values(int type, int rows, const struct bins_block *b, const struct weights *w,
                           int64_t *const *records) {
  const int64_t size = (int64_t)element_size((enum element_type)type);
  const int widened = rows > 1 || type > BFLOAT16 || b->v_scale != 1;
  _Alignas(64) double wide[BINS_BLOCK * SLICE];
  int64_t in_order[BINS_BLOCK];
  for (int t = 0; t < BINS_BLOCK; ++t) in_order[t] = t * SLICE * 8;
  for (int64_t d = 0; d < b->v_dim;) {
    const int many = b->v_dim - d >= SLICE, count = many ? SUMS : 1;
    struct values v = {b->v + d * size, b->v_rows, b->v + d * size + b->next_v, b->v_share, count * DOUBLES * size};
    if (widened) widen[type](b, d, count, wide), v.at = (const char *)wide, v.rows = in_order;
    for (int r = 0; r < rows; ++r, v.ahead_bytes = 0) {
      uint64_t *upper = (uint64_t *)records[r] + BINS_NUMERATOR + d;
      (many ? add_many : add_one)[widened ? WIDENED : type](&v, w + r, upper, upper + b->v_dim);
    }
    d += count * DOUBLES;
  }
}

/* Rows attend to a block, token by token. `value`: the exponent of the values that they see. */
static void attend_exactly(int type, const struct bins_block *b, const struct bins_rows *g, int32_t value) {
  _Alignas(64) float scores[ROWS_TOGETHER][BINS_BLOCK];
  struct weights w[ROWS_TOGETHER];
  score_rows[type][g->rows - 1](b, g->q, scores);
  for (int r = 0; r < g->rows; ++r)
    add_weights(weigh_row(b, g, r, scores[r], w + r), value, b->v_dim, w + r, g->records[r]);
  add_all_values(type, g->rows, b, w, g->records);
}

#endif
