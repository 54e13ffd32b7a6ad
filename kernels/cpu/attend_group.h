/* Several rows of each KV head attend to tokens that all of them see, in the order of memory: see attend_in_order.h.
 *
 * Arithmetic takes as long as reading, so both must go on at once. A key or value is loaded and widened once for up to
 * MAX_ROWS rows of its head: keys by TILE_TOKENS tokens, each of whose numbers of q is loaded once, values by as many
 * tokens as their sums then stay in registers for. With 32 registers of 16 lanes these are neighbours, and what the
 * hardware does not foresee then is asked for, into the second cache, as far ahead as a tile takes. Else tokens of
 * PLACES quarters of SUM_TOKENS go together, head by head, so that each place is read as a stream. */
#ifndef TREEATTN_ATTEND_GROUP_H
#define TREEATTN_ATTEND_GROUP_H

#include "in_order.h"

enum { TILE_TOKENS = WIDTH == 16 ? 4 : 2, MAX_ROWS = 4, MAX_UNITS = 4 };
enum { PLACES = WIDTH == 16 ? 1 : 4, SUMMED = WIDTH == 16 ? 32 : 4 };

/* Asked for where a unit is read, into the second cache: a core can wait for few lines of memory at a time. Units that
 * are parts of a line ask for it once. */
INLINE void prefetch_unit(enum element_type type, const char *at, int64_t offset, int64_t ahead) {
  const int64_t bytes = UNIT * (int64_t)element_size(type);
  if ((PLACES > 1 && !ahead) || (bytes < 64 && offset % 64)) return;
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + ahead + i, 0, 2);
}

/* Units summed together: as many sums as registers hold beside a unit and a weight, the half of them. */
INLINE int units_together(int rows) {
  const int sums = REGISTERS / 2;
  return rows == 1 ? MAX_UNITS : rows == 2 ? sums / 4 : sums / 8;
}

/* How many neighbours of a head go through at once, and how many bytes ahead they are asked for. Measured on an AMD
 * EPYC 9004 (Zen 4). Tokens of float32 often lie 4096 bytes apart, all in one set of the first cache. */
INLINE int tokens_summed(enum element_type type) { return type == FLOAT32 ? 4 : SUMMED; }
INLINE int group_keys_ahead(enum element_type type) { return type == FLOAT32 ? 32768 : 16384; }
enum { GROUP_VALUES_AHEAD = 65536 };

/* From a token's row to that which is about `bytes` further on; where tokens are listed, no further than known. */
INLINE int64_t way_ahead(enum element_type type, const struct in_order *o, const int64_t *rows, int64_t token,
                         int64_t stride, int64_t bytes) {
  if (PLACES > 1) return o->ahead;
  const int64_t tokens = bytes / (o->heads * o->floats * (int64_t)element_size(type)) + 1;
  if (!o->listed) return tokens * stride;
  return rows[least(token + tokens, o->tokens - 1)] - rows[token];
}

/* Tokens that go together: each is `apart` tokens behind the one before. */
struct tokens {
  int64_t first, apart;
  int count;
};

/* How often some of `tokens` go together, and which in turn i: one of each place, then neighbours. */
INLINE int whole_turns(int tokens) { return PLACES > 1 ? tokens / PLACES : 0; }
INLINE int turns_of(int tokens, int together) {
  return whole_turns(tokens) + (tokens - PLACES * whole_turns(tokens) + together - 1) / together;
}
INLINE struct tokens tokens_at(int64_t token, int tokens, int together, int i) {
  const int whole = whole_turns(tokens), rest = PLACES * whole + (i - whole) * together;
  if (i < whole) return (struct tokens){token + i, whole, PLACES};
  return (struct tokens){token + rest, 1, (int)least(together, tokens - rest)};
}

/* A tile's keys; the last token is repeated where there are fewer. */
INLINE void point_at_keys(const struct in_order *o, struct tokens t, int64_t head, const char **keys) {
  for (int i = 0; i < TILE_TOKENS; ++i)
    keys[i] = o->k + o->k_rows[t.first + (i < t.count ? i : t.count - 1) * t.apart] + head * o->k_head;
}

/* sum: [TILE_TOKENS][rows], and vectors of 0 up to MAX_ROWS. */
INLINE void fold_tile(int rows, const struct in_order *o, struct tokens t, vector *sum, float scale, float *scores) {
  float folded[MAX_ROWS * TILE_TOKENS];
  for (int i = 0; i < rows * TILE_TOKENS; i += WIDTH) store(folded + i, sum_each(sum + i) * splat(scale));
  for (int i = 0; i < TILE_TOKENS && i < t.count; ++i)
    for (int r = 0; r < rows; ++r) scores[i * t.apart * o->heads * o->rows + r] = folded[i * rows + r];
}

/* What a unit of keys adds to sums: `count` elements of it, UNIT or fewer. */
INLINE void score_unit(enum element_type type, int rows, const struct in_order *o, const char **keys, const float *q,
                       int64_t d, int count, int64_t ahead, vector *sum) {
  const int size = (int)element_size(type);
  unit key[TILE_TOKENS];
  for (int t = 0; t < TILE_TOKENS; ++t) {
    key[t] = count < UNIT ? load_part(type, keys[t] + d * size, count) : load_unit(type, keys[t] + d * size);
    prefetch_unit(type, keys[t] + d * size, d * size, ahead);
  }
  for (int half = 0; half < 2; ++half)
    for (int r = 0; r < rows; ++r) {
      const vector x = in_register(load(q + r * o->floats + d + half * WIDTH));
      for (int t = 0; t < TILE_TOKENS; ++t)
        sum[t * rows + r] = multiply_add(half ? key[t].second : key[t].first, x, sum[t * rows + r]);
    }
}

/* scores[token][row] of some tokens for `rows` rows of a head. */
INLINE void score_tile(enum element_type type, int rows, const struct in_order *o, struct tokens t, int64_t head,
                       int64_t row, int64_t ahead, float *scores) {
  for (; t.count > 0; t.count -= TILE_TOKENS, t.first += TILE_TOKENS * t.apart) {
    const char *keys[TILE_TOKENS];
    point_at_keys(o, t, head, keys);
    const float *const q = o->q + row * o->floats;
    vector sum[MAX_ROWS * TILE_TOKENS];
    for (int i = 0; i < MAX_ROWS * TILE_TOKENS; ++i) sum[i] = splat(0.0f);
    int64_t d = 0;
#pragma GCC unroll 1
    for (; d + UNIT <= o->elements; d += UNIT) score_unit(type, rows, o, keys, q, d, UNIT, ahead, sum);
    if (d < o->elements) score_unit(type, rows, o, keys, q, d, (int)(o->elements - d), ahead, sum);
    fold_tile(rows, o, t, sum, 1.0f, scores);
    scores += TILE_TOKENS * t.apart * o->heads * o->rows;
  }
}

/* Sums of `count` values for `rows` rows of a head and `units` units from element d on, or `part` elements of one. */
INLINE void add_tile(enum element_type type, int rows, int units, int part, const struct in_order *o, int count,
                     const char *const *from, const float *weights, int64_t d, int64_t ahead, float *to) {
  const int64_t size = (int64_t)element_size(type);
  vector sum[MAX_ROWS][2 * MAX_UNITS];
  __asm__("" : "+r"(weights) : : "memory"); /* they are read where they are: registers are for sums */
  for (int r = 0; r < rows; ++r)
    for (int u = 0; u < 2 * units; ++u) sum[r][u] = load(to + r * o->floats + d + u * WIDTH);
  for (int i = 0; i < count; ++i) {
    const char *const at = from[i] + d * size;
    unit value[MAX_UNITS];
    for (int u = 0; u < units; ++u) {
      value[u] = part ? load_part(type, at, part) : load_unit(type, at + u * UNIT * size);
      prefetch_unit(type, at + u * UNIT * size, (d + u * UNIT) * size, ahead);
    }
    for (int r = 0; r < rows; ++r) {
      const vector weight = splat(weights[i * MAX_ROWS + r]);
      for (int u = 0; u < units; ++u) {
        sum[r][2 * u] = multiply_add(value[u].first, weight, sum[r][2 * u]);
        sum[r][2 * u + 1] = multiply_add(value[u].second, weight, sum[r][2 * u + 1]);
      }
    }
  }
  for (int r = 0; r < rows; ++r)
    for (int u = 0; u < 2 * units; ++u) store(to + r * o->floats + d + u * WIDTH, sum[r][u]);
}

/* The same for all of a row. */
INLINE void add_tile_rows(enum element_type type, int rows, const struct in_order *o, struct tokens t, int64_t head,
                          int64_t row, int64_t ahead, const float *weights) {
  const int units = units_together(rows);
  const char *from[SUMMED];
  float copy[SUMMED * MAX_ROWS], *const to = o->sum + row * o->floats;
  int64_t d = 0;
  for (int i = 0; i < t.count; ++i) {
    from[i] = o->v + o->v_rows[t.first + i * t.apart] + head * o->v_head;
    for (int r = 0; r < rows; ++r) copy[i * MAX_ROWS + r] = weights[i * t.apart * o->heads * o->rows + r];
  }
  if (PLACES == 1 || t.count == PLACES) /* constant, the latter: so the compiler unrolls it */
    for (; d + units * UNIT <= o->elements; d += units * UNIT)
      add_tile(type, rows, units, 0, o, PLACES == 1 ? t.count : PLACES, from, copy, d, ahead, to);
  for (; d + UNIT <= o->elements; d += UNIT) add_tile(type, rows, 1, 0, o, t.count, from, copy, d, ahead, to);
  if (d < o->elements) add_tile(type, rows, 1, (int)(o->elements - d), o, t.count, from, copy, d, ahead, to);
}

/* Calls a function of a tile for the rows of all heads, which go through by MAX_ROWS at most. T: some of the tokens
 * from TOKEN on. */
#define FOR_ROWS(FUNCTION, TYPE, O, TOKEN, T, AHEAD)                                                                   \
  for (int64_t head = 0, row = 0; head < (O)->heads; ++head)                                                           \
    for (int left = (O)->rows, some; left; left -= some, row += some) {                                                \
      float *const scores = (O)->scores + ((T).first - (TOKEN)) * (O)->heads * (O)->rows + row;                        \
      some = left <= MAX_ROWS ? left : (int)least(MAX_ROWS, (left + 1) / 2);                                           \
      if (some == 1) FUNCTION(TYPE, 1, O, T, head, row, AHEAD, scores);                                                \
      if (some == 2) FUNCTION(TYPE, 2, O, T, head, row, AHEAD, scores);                                                \
      if (some == 3) FUNCTION(TYPE, 3, O, T, head, row, AHEAD, scores);                                                \
      if (some == 4) FUNCTION(TYPE, 4, O, T, head, row, AHEAD, scores);                                                \
    }

INLINE void score_group(enum element_type type, const struct in_order *o, int64_t token, int tokens) {
  for (int i = 0; i < turns_of(tokens, TILE_TOKENS); ++i) {
    const struct tokens t = tokens_at(token, tokens, TILE_TOKENS, i);
    const int64_t ahead = way_ahead(type, o, o->k_rows, t.first, o->k_token, group_keys_ahead(type));
    FOR_ROWS(score_tile, type, o, token, t, ahead)
  }
}

INLINE void add_group(enum element_type type, const struct in_order *o, int64_t token, int tokens) {
  for (int i = 0; i < turns_of(tokens, tokens_summed(type)); ++i) {
    const struct tokens t = tokens_at(token, tokens, tokens_summed(type), i);
    const int64_t ahead = way_ahead(type, o, o->v_rows, t.first, o->v_token, GROUP_VALUES_AHEAD);
    FOR_ROWS(add_tile_rows, type, o, token, t, ahead)
  }
}

#if SIMD_AVX512
/* Keys and queries of bfloat16 as they are: their products are exact in float32, and one instruction adds two of them.
 * The scale comes after. */
#define FOR_BFLOAT16 __attribute__((target("avx512bf16")))
FOR_BFLOAT16 INLINE void score_bits_tile(enum element_type type, int rows, const struct in_order *o, struct tokens t,
                                         int64_t head, int64_t row, int64_t ahead, float *scores) {
  const char *keys[TILE_TOKENS];
  point_at_keys(o, t, head, keys);
  const uint16_t *const q = o->q_bits + row * o->floats;
  vector sum[MAX_ROWS * TILE_TOKENS];
  for (int i = 0; i < MAX_ROWS * TILE_TOKENS; ++i) sum[i] = splat(0.0f);
#pragma GCC unroll 1
  for (int64_t d = 0; d < o->floats; d += UNIT) {
    __m512bh key[TILE_TOKENS];
    for (int i = 0; i < TILE_TOKENS; ++i) {
      key[i] = (__m512bh)_mm512_loadu_si512(keys[i] + 2 * d);
      prefetch_unit(type, keys[i] + 2 * d, 2 * d, ahead);
    }
    for (int r = 0; r < rows; ++r) {
      const __m512bh bits = (__m512bh)_mm512_loadu_si512(q + r * o->floats + d);
      for (int i = 0; i < TILE_TOKENS; ++i)
        sum[i * rows + r] = (vector)_mm512_dpbf16_ps((__m512)sum[i * rows + r], key[i], bits);
    }
  }
  fold_tile(rows, o, t, sum, o->scale, scores);
}

FOR_BFLOAT16 static __attribute__((noinline)) void score_bits(const struct in_order *o, int64_t token, int tokens) {
  for (int i = 0; i < turns_of(tokens, TILE_TOKENS); ++i) {
    const struct tokens t = tokens_at(token, tokens, TILE_TOKENS, i);
    const int64_t ahead = way_ahead(BFLOAT16, o, o->k_rows, t.first, o->k_token, group_keys_ahead(BFLOAT16));
    FOR_ROWS(score_bits_tile, BFLOAT16, o, token, t, ahead)
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
