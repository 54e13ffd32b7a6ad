/* Several rows of each KV head attend to tokens that all of them see, in the order of memory: see attend_in_order.h.
 *
 * Arithmetic takes as long as reading, so both must go on at once. Keys go through registers by TILE_TOKENS tokens of a
 * head, for all of its rows, values by SUMMED tokens; what the hardware does not foresee then is asked for, into the
 * second cache, as far ahead as a tile takes. */
#ifndef TREEATTN_ATTEND_GROUP_H
#define TREEATTN_ATTEND_GROUP_H

#include "in_order.h"

enum { TILE_TOKENS = WIDTH == 16 ? 4 : 2, MAX_ROWS = 4, MAX_UNITS = 4 };

/* Asked for where a unit is read, into the second cache: a core can wait for few lines of memory at a time. Units of
 * 8-bit elements are parts of a line, which is asked for once. */
INLINE void prefetch_unit(enum element_type type, const char *at, int64_t offset) {
  if (type > BFLOAT16 && offset % 64) return;
  for (size_t i = 0; i < UNIT * element_size(type); i += 64) __builtin_prefetch(at + i, 0, 2);
}

/* Units summed together: as many sums as registers hold beside a unit and a weight, the half of them. */
INLINE int units_together(int rows) {
  const int sums = REGISTERS / 2;
  return rows == 1 ? MAX_UNITS : rows == 2 ? sums / 4 : sums / 8;
}

/* How many tokens of a head go through at once, for keys and for values, and how many bytes ahead they are asked for.
 * Measured on an AMD EPYC 9004 (Zen 4). Tokens of float32 often lie 4096 bytes apart, all in one set of the first
 * cache. */
INLINE int tokens_scored(enum element_type type) { return WIDTH == 16 || type == FLOAT32 ? TILE_TOKENS : 16; }
INLINE int tokens_summed(enum element_type type) { return type == FLOAT32 ? 4 : WIDTH == 16 ? 32 : 16; }
INLINE int group_keys_ahead(enum element_type type) { return type == FLOAT32 ? 32768 : WIDTH == 16 ? 16384 : 65536; }
INLINE int group_values_ahead(enum element_type type) { return WIDTH == 16 || type == FLOAT32 ? 65536 : 32768; }

/* From a token's row to that which is about `bytes` further on; where tokens are listed, no further than known. */
INLINE int64_t way_ahead(enum element_type type, const struct in_order *o, const int64_t *rows, int64_t token,
                         int64_t stride, int64_t bytes) {
  const int64_t tokens = bytes / (o->heads * o->floats * (int64_t)element_size(type)) + 1;
  if (!o->listed) return tokens * stride;
  return rows[least(token + tokens, o->tokens - 1)] - rows[token];
}

/* A tile's keys; the last token is repeated where there are fewer. */
INLINE void point_at_keys(const struct in_order *o, int64_t token, int tokens, int64_t head, const char **keys) {
  for (int t = 0; t < TILE_TOKENS; ++t)
    keys[t] = o->k + o->k_rows[token + (t < tokens ? t : tokens - 1)] + head * o->k_head;
}

/* sum: [TILE_TOKENS][rows], and vectors of 0 up to MAX_ROWS. */
INLINE void fold_tile(int rows, const struct in_order *o, int tokens, vector *sum, float scale, float *scores) {
  float folded[MAX_ROWS * TILE_TOKENS];
  for (int i = 0; i < rows * TILE_TOKENS; i += WIDTH) store(folded + i, sum_each(sum + i) * splat(scale));
  for (int t = 0; t < tokens; ++t)
    memcpy(scores + t * o->heads * o->rows, folded + t * rows, sizeof(float) * (size_t)rows);
}

/* What a unit of keys adds to sums: `count` elements of it, UNIT or fewer. */
INLINE void score_unit(enum element_type type, int rows, const struct in_order *o, const char **keys, const float *q,
                       int64_t d, int count, int64_t ahead, vector *sum) {
  const int size = (int)element_size(type);
  unit key[TILE_TOKENS];
  for (int t = 0; t < TILE_TOKENS; ++t) {
    key[t] = count < UNIT ? load_part(type, keys[t] + d * size, count) : load_unit(type, keys[t] + d * size);
    prefetch_unit(type, keys[t] + d * size + ahead, d * size);
  }
  for (int r = 0; r < rows; ++r) {
    const vector first = load(q + r * o->floats + d), second = load(q + r * o->floats + d + WIDTH);
    for (int t = 0; t < TILE_TOKENS; ++t) sum[t * rows + r] = multiply_add(key[t].first, first, sum[t * rows + r]);
    for (int t = 0; t < TILE_TOKENS; ++t) sum[t * rows + r] = multiply_add(key[t].second, second, sum[t * rows + r]);
  }
}

/* scores[token][row] of `tokens` tokens for `rows` rows of a head. */
INLINE void score_tile(enum element_type type, int rows, const struct in_order *o, int64_t token, int tokens,
                       int64_t head, int64_t row, int64_t ahead, float *scores) {
  for (; tokens > 0; tokens -= TILE_TOKENS, token += TILE_TOKENS, scores += TILE_TOKENS * o->heads * o->rows) {
    const char *keys[TILE_TOKENS];
    point_at_keys(o, token, tokens, head, keys);
    const float *const q = o->q + row * o->floats;
    vector sum[MAX_ROWS * TILE_TOKENS];
    for (int i = 0; i < MAX_ROWS * TILE_TOKENS; ++i) sum[i] = splat(0.0f);
    int64_t d = 0;
#pragma GCC unroll 1
    for (; d + UNIT <= o->elements; d += UNIT) score_unit(type, rows, o, keys, q, d, UNIT, ahead, sum);
    if (d < o->elements) score_unit(type, rows, o, keys, q, d, (int)(o->elements - d), ahead, sum);
    fold_tile(rows, o, (int)least(TILE_TOKENS, tokens), sum, 1.0f, scores);
  }
}

/* Sums of values in a tile, for `rows` rows of a head and `units` units from element d on, or `part` elements of one.
 */
INLINE void add_tile(enum element_type type, int rows, int units, int part, const struct in_order *o, int64_t token,
                     int tokens, int64_t head, int64_t row, int64_t d, int64_t ahead, const float *weights) {
  const int size = (int)element_size(type);
  const char *const values = o->v + head * o->v_head + d * size;
  float *const to = o->sum + row * o->floats + d;
  vector sum[MAX_ROWS][2 * MAX_UNITS];
  for (int r = 0; r < rows; ++r)
    for (int u = 0; u < 2 * units; ++u) sum[r][u] = load(to + r * o->floats + u * WIDTH);
#pragma GCC unroll 1
  for (int t = 0; t < tokens; ++t, weights += o->heads * o->rows) {
    const char *from = values + o->v_rows[token + t];
    unit value[MAX_UNITS];
    for (int u = 0; u < units; ++u) {
      value[u] = part ? load_part(type, from, part) : load_unit(type, from + u * UNIT * size);
      prefetch_unit(type, from + u * UNIT * size + ahead, (d + u * UNIT) * size);
    }
    for (int r = 0; r < rows; ++r) {
      const vector weight = splat(weights[r]);
      for (int u = 0; u < units; ++u) {
        sum[r][2 * u] = multiply_add(value[u].first, weight, sum[r][2 * u]);
        sum[r][2 * u + 1] = multiply_add(value[u].second, weight, sum[r][2 * u + 1]);
      }
    }
  }
  for (int r = 0; r < rows; ++r)
    for (int u = 0; u < 2 * units; ++u) store(to + r * o->floats + u * WIDTH, sum[r][u]);
}

/* The same for all of a row. */
INLINE void add_tile_rows(enum element_type type, int rows, const struct in_order *o, int64_t token, int tokens,
                          int64_t head, int64_t row, int64_t ahead, const float *weights) {
  const int units = units_together(rows);
  int64_t d = 0;
  for (; d + units * UNIT <= o->elements; d += units * UNIT)
    add_tile(type, rows, units, 0, o, token, tokens, head, row, d, ahead, weights);
  for (; d + UNIT <= o->elements; d += UNIT) add_tile(type, rows, 1, 0, o, token, tokens, head, row, d, ahead, weights);
  if (d < o->elements) add_tile(type, rows, 1, (int)(o->elements - d), o, token, tokens, head, row, d, ahead, weights);
}

/* Calls a function of a tile for the rows of all heads, which go through by MAX_ROWS at most. */
#define FOR_ROWS(FUNCTION, TYPE, O, TOKEN, TOKENS, AHEAD, SCORES)                                                      \
  for (int64_t head = 0; head < (O)->heads; ++head)                                                                    \
    for (int64_t part = 0, parts = ((O)->rows + MAX_ROWS - 1) / MAX_ROWS; part < parts; ++part) {                      \
      const int64_t first = part * (O)->rows / parts, row = head * (O)->rows + first;                                  \
      switch ((part + 1) * (O)->rows / parts - first) {                                                                \
      case 1:                                                                                                          \
        FUNCTION(TYPE, 1, O, TOKEN, TOKENS, head, row, AHEAD, (SCORES) + row);                                         \
        break;                                                                                                         \
      case 2:                                                                                                          \
        FUNCTION(TYPE, 2, O, TOKEN, TOKENS, head, row, AHEAD, (SCORES) + row);                                         \
        break;                                                                                                         \
      case 3:                                                                                                          \
        FUNCTION(TYPE, 3, O, TOKEN, TOKENS, head, row, AHEAD, (SCORES) + row);                                         \
        break;                                                                                                         \
      default:                                                                                                         \
        FUNCTION(TYPE, 4, O, TOKEN, TOKENS, head, row, AHEAD, (SCORES) + row);                                         \
      }                                                                                                                \
    }

INLINE void score_group(enum element_type type, const struct in_order *o, int64_t token, int tokens) {
  for (int t = 0; t < tokens; t += tokens_scored(type)) {
    const int64_t ahead = way_ahead(type, o, o->k_rows, token + t, o->k_token, group_keys_ahead(type));
    const int count = (int)least(tokens_scored(type), tokens - t);
    FOR_ROWS(score_tile, type, o, token + t, count, ahead, o->scores + t * o->heads * o->rows)
  }
}

INLINE void add_group(enum element_type type, const struct in_order *o, int64_t token, int tokens) {
  for (int t = 0; t < tokens; t += tokens_summed(type)) {
    const int64_t ahead = way_ahead(type, o, o->v_rows, token + t, o->v_token, group_values_ahead(type));
    const int count = (int)least(tokens_summed(type), tokens - t);
    FOR_ROWS(add_tile_rows, type, o, token + t, count, ahead, o->scores + t * o->heads * o->rows)
  }
}

#if SIMD_AVX512
/* Keys and queries of bfloat16 as they are: their products are exact in float32, and one instruction adds two of them.
 * The scale comes after. */
#define FOR_BFLOAT16 __attribute__((target("avx512bf16")))
FOR_BFLOAT16 INLINE void score_bits_tile(enum element_type type, int rows, const struct in_order *o, int64_t token,
                                         int tokens, int64_t head, int64_t row, int64_t ahead, float *scores) {
  const char *keys[TILE_TOKENS];
  point_at_keys(o, token, tokens, head, keys);
  const uint16_t *const q = o->q_bits + row * o->floats;
  vector sum[MAX_ROWS * TILE_TOKENS];
  for (int i = 0; i < MAX_ROWS * TILE_TOKENS; ++i) sum[i] = splat(0.0f);
#pragma GCC unroll 1
  for (int64_t d = 0; d < o->floats; d += UNIT) {
    __m512bh key[TILE_TOKENS];
    for (int t = 0; t < TILE_TOKENS; ++t) {
      key[t] = (__m512bh)_mm512_loadu_si512(keys[t] + 2 * d);
      prefetch_unit(type, keys[t] + 2 * d + ahead, 2 * d);
    }
    for (int r = 0; r < rows; ++r) {
      const __m512bh bits = (__m512bh)_mm512_loadu_si512(q + r * o->floats + d);
      for (int t = 0; t < TILE_TOKENS; ++t)
        sum[t * rows + r] = (vector)_mm512_dpbf16_ps((__m512)sum[t * rows + r], key[t], bits);
    }
  }
  fold_tile(rows, o, tokens, sum, o->scale, scores);
}

FOR_BFLOAT16 static __attribute__((noinline)) void score_bits(const struct in_order *o, int64_t token, int tokens) {
  for (int t = 0; t < tokens; t += TILE_TOKENS) {
    const int64_t ahead = way_ahead(BFLOAT16, o, o->k_rows, token + t, o->k_token, group_keys_ahead(BFLOAT16));
    const int count = (int)least(TILE_TOKENS, tokens - t);
    FOR_ROWS(score_bits_tile, BFLOAT16, o, token + t, count, ahead, o->scores + t * o->heads * o->rows)
  }
}

/* Queries of a piece as they are. That instruction takes subnormal numbers for 0: returns whether q has none, and is
 * not so large that those among the keys count. */
static int take_bits(const struct attention *a, const struct piece *p, uint16_t *to) {
  enum { LARGEST_EXPONENT = 127 + 96 };
  const int64_t first = p->head * rows_per_kv_head(a), count = p->heads * rows_per_kv_head(a);
  for (int64_t r = first; r < first + count; ++r, to += a->head_dim) {
    memcpy(to, query_at(a, p->b, r), (size_t)a->head_dim * sizeof *to);
    for (int64_t d = 0; d < a->head_dim; ++d) {
      const int exponent = to[d] >> 7 & 0xff;
      if (exponent > LARGEST_EXPONENT || (!exponent && to[d] & 0x7f)) return 0;
    }
  }
  return 1;
}
#endif
#undef FOR_ROWS

#endif
