/* Rows attend to tokens that all of them see, and the cache is read in the order of memory.
 *
 * A block of tokens is two passes: all keys, token by token and head by head as they lie, then all values likewise.
 * Each pass is one stream, which the hardware foresees: on cores that follow few streams that reads up to 1.5 times as
 * fast as heads or tokens in turns. What does not come from memory stays in the first caches: the queries of all heads
 * in one pass, sums of all heads in the other. How a row's sums are ordered depends on its own tokens alone, so that
 * heads may be dealt out to threads.
 *
 * With several rows for each KV head (attend_group.h) arithmetic takes as long as reading: there a few tokens of a head
 * go through registers together, and lines of memory are asked for in time. */
#ifndef TREEATTN_ATTEND_IN_ORDER_H
#define TREEATTN_ATTEND_IN_ORDER_H

#include "attend_group.h"

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
  if (q == o->q + o->heads * o->floats) next->q = o->q, next->key = o->k + *++next->row;
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
  const int count = tokens * o->heads;
  int i = 0;
  for (; i + WIDTH <= count; i += WIDTH) store(o->scores + i, fold_keys(type, o, &next));
  if (i == count) return;
  vector left[WIDTH];
  for (int j = 0; j < WIDTH; ++j) left[j] = i + j < count ? multiply_key(type, o, &next) : splat(0.0f);
  for (int distance = 1; distance < WIDTH; distance *= 2)
    for (int j = 0; j < WIDTH / 2 / distance; ++j) left[j] = fold_lanes(left[2 * j], left[2 * j + 1], distance);
  store(o->scores + i, left[0]);
}

/* sum += weight * value for all heads of a token. */
INLINE void add_token(enum element_type type, const struct in_order *o, const char *head, const float *weights) {
  const int step = step_of_type(type);
  float *to = o->sum;
  for (int h = 0; h < o->heads; ++h, head += o->v_head) {
    const vector weight = splat(weights[h]);
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

/* Weighted values of at most SUM_TOKENS tokens. */
INLINE void add_in_order(enum element_type type, const struct in_order *o, int64_t token, int tokens) {
  for (int t = 0; t < tokens; ++t) add_token(type, o, o->v + o->v_rows[token + t], o->scores + t * o->heads);
}

/* One compiled function for each type and pass: a compiler aligns and orders short ones best. */
typedef void pass_function(const struct in_order *o, int64_t token, int tokens);
#define PASS(NAME, TYPE)                                                                                               \
  static __attribute__((noinline)) void NAME##_##TYPE(const struct in_order *o, int64_t token, int tokens) {           \
    NAME(TYPE, o, token, tokens);                                                                                      \
  }
#define PASSES(NAME) PASS(NAME, FLOAT32) PASS(NAME, FLOAT16) PASS(NAME, BFLOAT16) PASS(NAME, E4M3FN) PASS(NAME, E5M2)
PASSES(score_in_order)
PASSES(score_group)
PASSES(add_in_order)
PASSES(add_group)
#define OF_TYPES(NAME) {NAME##_FLOAT32, NAME##_FLOAT16, NAME##_BFLOAT16, NAME##_E4M3FN, NAME##_E5M2}
static pass_function *const score_in_order_of_type[5] = OF_TYPES(score_in_order);
static pass_function *const score_group_of_type[5] = OF_TYPES(score_group);
static pass_function *const add_in_order_of_type[5] = OF_TYPES(add_in_order);
static pass_function *const add_group_of_type[5] = OF_TYPES(add_group);

/* One row for each head, in the order of memory, and whole units: else as a group. */
static int is_one_stream(const struct in_order *o) { return o->rows == 1 && o->elements == o->floats && !o->scattered; }

static pass_function *score_function(enum element_type type, const struct in_order *o) {
#if SIMD_AVX512
  if (o->q_bits) return score_bits;
#endif
  return (is_one_stream(o) ? score_in_order_of_type : score_group_of_type)[type];
}

static void attend_in_order(enum element_type type, const struct in_order *o) {
  const int rows = o->heads * o->rows;
  pass_function *const add = (is_one_stream(o) ? add_in_order_of_type : add_group_of_type)[type];
  for (int64_t token = 0, count; token < o->tokens; token += count) {
    count = least(o->block, o->tokens - token);
    score_function(type, o)(o, token, (int)count);
    adjust_in_order(o, token, (int)count);
    weigh_in_order(o, (int)count);
    for (int64_t begin = 0, some; begin < count; begin += some) {
      some = least(SUM_TOKENS, count - begin);
      memset(o->sum, 0, (size_t)(rows * o->floats) * sizeof(float));
      struct in_order part = *o;
      part.scores += begin * rows;
      add(&part, token + begin, (int)some);
      for (int r = 0; r < rows; ++r) {
        const vector factor = splat(begin ? 1.0f : o->factor[r]);
        for (int64_t d = r * o->floats; d < (r + 1) * o->floats; d += WIDTH)
          store(o->numerator + d, multiply_add(load(o->numerator + d), factor, load(o->sum + d)));
      }
    }
  }
}

#endif
