/* One query row for each KV head attends to tokens that all rows see, and the cache is read in the order of memory.
 *
 * A block of tokens is two passes: all keys, token by token and head by head as they lie, then all values likewise.
 * Each pass is one stream, which the hardware foresees: on cores that follow few streams that reads up to 1.5 times as
 * fast as heads or tokens in turns. What does not come from memory stays in the first caches: the queries of all heads
 * in one pass, sums of all heads in the other. How a row's sums are ordered depends on its own tokens alone, so that
 * heads may be dealt out to threads. */
#ifndef TREEATTN_ATTEND_IN_ORDER_H
#define TREEATTN_ATTEND_IN_ORDER_H

#include <stdlib.h>

#include "attention_state.h"
#include "token_rows.h"

/* Tokens whose values are added one by one: 512 would break the promise of exactness for equal scores and values. */
enum { SUM_TOKENS = 128 };

/* Tokens of a block, and how many bytes ahead values are asked for (0: not). Measured on an AMD EPYC 9004 (Zen 4):
 * where values are added faster than they come, changing between keys and values costs least and asking gains nothing;
 * elements of 16 bits and fewer make more sums for each line of memory, which delays what is read next. */
INLINE int tokens_in_order(enum element_type type) { return type == FLOAT32 ? 128 : WIDTH == 16 ? 512 : 256; }
INLINE int values_ahead(enum element_type type) {
  if (type == FLOAT32) return WIDTH == 16 ? 512 : 0;
  return 8192;
}

/* Rows of neighbouring KV heads, and the tokens of a piece. */
struct in_order {
  int rows;
  int64_t floats;                 /* of a row of q */
  const char *k, *v;              /* of the first head */
  int64_t k_head, v_head;         /* bytes from a head to the next */
  const int64_t *k_rows, *v_rows; /* [tokens + 1]: how far from there each token's row is; the last is not read */
  const float *q;                 /* [rows][floats], as all that follows in a state */
  float *numerator, *sum;
  float *maximum, *denominator, *factor;
  float *scores, *lanes;
};

/* What a loop takes at once: a line of memory, so that one load sees all of it, or a unit where that is less. */
INLINE int step_of_type(enum element_type type) { return type == FLOAT32 && WIDTH == 16 ? WIDTH : UNIT; }
INLINE unit load_step(enum element_type type, const char *from) {
  return step_of_type(type) == WIDTH ? (unit){load((const float *)from), splat(0.0f)} : load_unit(type, from);
}

/* The key that comes next in the order of memory, and its row of q. */
struct next_key {
  const char *key;
  const float *q;
  const int64_t *row;
};

/* Products of a key with its row of q, as sums by lane. */
INLINE vector multiply_key(enum element_type type, const struct in_order *o, struct next_key *next) {
  const int step = step_of_type(type);
  vector first = splat(0.0f), second = first;
  const char *key = next->key;
  const float *q = next->q, *const end = q + o->floats;
#pragma GCC unroll 1
  do {
    const unit k = load_step(type, key);
    first = multiply_add(k.first, load(q), first);
    if (step > WIDTH) second = multiply_add(k.second, load(q + WIDTH), second);
    key += step * (int)element_size(type), q += step;
  } while (q != end);
  next->q = q, next->key += o->k_head;
  if (q == o->q + o->rows * o->floats) next->q = o->q, next->key = o->k + *++next->row;
  return step > WIDTH ? (vector)(first + second) : first;
}

/* Sums of keys are folded in pairs as soon as they are there: all at once they would delay the loads that follow. */
#define FOLD(KEYS, HALF, DISTANCE)                                                                                     \
  INLINE vector fold_##KEYS(enum element_type type, const struct in_order *o, struct next_key *next) {                 \
    const vector a = HALF(type, o, next), b = HALF(type, o, next);                                                     \
    return fold_lanes(a, b, DISTANCE);                                                                                 \
  }
FOLD(2, multiply_key, 1)
FOLD(4, fold_2, 2)
#if WIDTH >= 8
FOLD(8, fold_4, 4)
#endif
#if WIDTH == 16
FOLD(16, fold_8, 8)
#define fold_keys fold_16
#elif WIDTH == 8
#define fold_keys fold_8
#else
#define fold_keys fold_4
#endif
#undef FOLD

/* scores[token][row], in the order of memory. */
INLINE void score_in_order(enum element_type type, const struct in_order *o, int64_t token, int tokens) {
  struct next_key next = {o->k + o->k_rows[token], o->q, o->k_rows + token};
  const int count = tokens * o->rows;
  int i = 0;
  for (; i + WIDTH <= count; i += WIDTH) store(o->scores + i, fold_keys(type, o, &next));
  if (i == count) return;
  vector left[WIDTH];
  for (int j = 0; j < WIDTH; ++j) left[j] = i + j < count ? multiply_key(type, o, &next) : splat(0.0f);
  for (int distance = 1; distance < WIDTH; distance *= 2)
    for (int j = 0; j < WIDTH / 2 / distance; ++j) left[j] = fold_lanes(left[2 * j], left[2 * j + 1], distance);
  store(o->scores + i, left[0]);
}

/* Scores to weights, in place; sums by token modulo WIDTH go to the denominators. */
static __attribute__((noinline)) void weigh_in_order(const struct in_order *o, int tokens) {
  const int rows = o->rows, lanes = rows * WIDTH, whole = (tokens + WIDTH - 1) / WIDTH * lanes;
  for (int i = tokens * rows; i < whole; ++i) o->scores[i] = -INFINITY;
  for (int l = 0; l < lanes; l += WIDTH) {
    vector highest = load(o->scores + l);
    for (int i = l + lanes; i < whole; i += lanes) highest = larger(load(o->scores + i), highest);
    store(o->lanes + l, highest);
  }
  for (int r = 0; r < rows; ++r) {
    float highest = o->maximum[r];
    for (int i = r; i < lanes; i += rows) highest = o->lanes[i] > highest ? o->lanes[i] : highest;
    o->factor[r] = o->maximum[r] == highest ? 1.0f : exponential(o->maximum[r] - highest);
    o->maximum[r] = highest;
    for (int i = r; i < lanes; i += rows) o->lanes[i] = highest == -INFINITY ? 0.0f : highest;
  }
  for (int l = 0; l < lanes; l += WIDTH) {
    const vector base = load(o->lanes + l);
    vector sum = splat(0.0f);
    for (int i = l; i < whole; i += lanes) {
      const vector weight = exponential_lanes(load(o->scores + i) - base);
      store(o->scores + i, weight);
      sum += weight;
    }
    store(o->lanes + l, sum);
  }
  for (int r = 0; r < rows; ++r)
    for (int i = 0; i < WIDTH; ++i) {
      float *to = o->denominator + r * WIDTH + i;
      *to = *to * o->factor[r] + o->lanes[i * rows + r];
    }
}

/* sum += weight * value for all heads of a token. */
INLINE void add_token(enum element_type type, const struct in_order *o, const char *head, const float *weights) {
  const int step = step_of_type(type);
  float *to = o->sum;
  for (int r = 0; r < o->rows; ++r, head += o->v_head) {
    const vector weight = splat(weights[r]);
    const char *v = head;
    const float *const end = to + o->floats;
#pragma GCC unroll 1
    do {
      const unit u = load_step(type, v);
      if (values_ahead(type)) __builtin_prefetch(v + values_ahead(type), 0, 2);
      store(to, multiply_add(u.first, weight, load(to)));
      if (step > WIDTH) store(to + WIDTH, multiply_add(u.second, weight, load(to + WIDTH)));
      v += step * (int)element_size(type), to += step;
    } while (to != end);
  }
}

/* A block's values, in sums of SUM_TOKENS at most. */
INLINE void add_in_order(enum element_type type, const struct in_order *o, int64_t token, int tokens) {
  for (int begin = 0; begin < tokens; begin += SUM_TOKENS) {
    memset(o->sum, 0, (size_t)(o->rows * o->floats) * sizeof(float));
    for (int t = begin; t < tokens && t < begin + SUM_TOKENS; ++t)
      add_token(type, o, o->v + o->v_rows[token + t], o->scores + t * o->rows);
    for (int r = 0; r < o->rows; ++r) {
      const vector factor = splat(begin ? 1.0f : o->factor[r]);
      for (int64_t d = r * o->floats; d < (r + 1) * o->floats; d += WIDTH)
        store(o->numerator + d, multiply_add(load(o->numerator + d), factor, load(o->sum + d)));
    }
  }
}

/* One compiled function for each type. */
typedef void attend_in_order_function(const struct in_order *o, int64_t tokens);
#define IN_ORDER(TYPE)                                                                                                 \
  static void attend_in_order_##TYPE(const struct in_order *o, int64_t tokens) {                                       \
    for (int64_t token = 0, count; token < tokens; token += count) {                                                   \
      count = least(tokens_in_order(TYPE), tokens - token);                                                            \
      score_in_order(TYPE, o, token, (int)count);                                                                      \
      weigh_in_order(o, (int)count);                                                                                   \
      add_in_order(TYPE, o, token, (int)count);                                                                        \
    }                                                                                                                  \
  }
IN_ORDER(FLOAT32)
IN_ORDER(FLOAT16)
IN_ORDER(BFLOAT16)
IN_ORDER(E4M3FN)
IN_ORDER(E5M2)
static attend_in_order_function *const in_order_of_type[5] = {attend_in_order_FLOAT32, attend_in_order_FLOAT16,
                                                              attend_in_order_BFLOAT16, attend_in_order_E4M3FN,
                                                              attend_in_order_E5M2};

/* The rows of a piece attend to tokens that all of them see: together where a token's heads are neighbours in memory,
 * one by one where a head's tokens are. */
static void attend_uniform(const struct attention *a, const struct state *s, const struct piece *p, int64_t begin,
                           int64_t end) {
  const int64_t together = llabs(a->k_head_stride) > llabs(a->k_token_stride) ? 1 : p->heads, tokens = end - begin;
  find_rows(a, p->b, begin, end, 1, s->k_rows);
  find_rows(a, p->b, begin, end, 0, s->v_rows);
  s->k_rows[tokens] = 0;
  for (int64_t row = 0; row < p->heads; row += together) {
    const int64_t head = p->head + row;
    const struct in_order o = {.rows = (int)together,
                               .floats = row_floats(a),
                               .k = a->k + head * a->k_head_stride,
                               .v = a->v + head * a->v_head_stride,
                               .k_head = a->k_head_stride,
                               .v_head = a->v_head_stride,
                               .k_rows = s->k_rows,
                               .v_rows = s->v_rows,
                               .q = s->q + row * row_floats(a),
                               .numerator = s->numerator + row * row_floats(a),
                               .sum = s->sum,
                               .maximum = s->maximum + row,
                               .denominator = s->denominator + row * WIDTH,
                               .factor = s->factor,
                               .scores = s->scores,
                               .lanes = s->lanes};
    in_order_of_type[a->kv_type](&o, tokens);
  }
}

#endif
