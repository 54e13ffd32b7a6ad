/* Rows attend to tokens that all of them see, and the cache is read in the order of memory.
 *
 * A block of tokens is two passes: all keys, then all values. What does not come from memory stays in the first caches:
 * the queries of all heads in one pass, sums of all heads in the other. How a row's sums are ordered depends on its own
 * tokens alone, so that heads may be dealt out to threads.
 *
 * With one row for each KV head memory is the limit, and how it is read best differs between processors: as one stream,
 * which the hardware foresees, or from STREAMS places in turn, a row of a head of each (whole tokens in turn gain
 * nothing). So a block has RANGES neighbouring ranges of tokens, fewer where they would be short. Each has a sum of its
 * own values, token by token, and sums are merged in ascending order: the bits are the same whether ranges are read one
 * after the other or STREAMS of them in turn.
 *
 * With several rows for each KV head (attend_group.h) arithmetic takes as long as reading: there a few tokens of a head
 * go through registers together. */
#ifndef TREEATTN_ATTEND_IN_ORDER_H
#define TREEATTN_ATTEND_IN_ORDER_H

#include "attend_group.h"

enum { RANGES = 8, SHORTEST_RANGE = 32 }; /* tokens of a range, at least, but of the last */

/* What a loop takes at once: a line of memory, so that one load sees all of it, or a unit where that is less. */
INLINE int step_of_type(enum element_type type) { return type == FLOAT32 && WIDTH == 16 ? WIDTH : UNIT; }
INLINE unit load_step(enum element_type type, const char *from) {
  return step_of_type(type) == WIDTH ? (unit){load((const float *)from), splat(0.0f)} : load_unit(type, from);
}

/* Asks for what follows a row of a stream, where several are read in turn. */
INLINE void ask_ahead(enum element_type type, const struct in_order *o, const char *row) {
  const int64_t bytes = o->floats * (int64_t)element_size(type);
  for (int64_t i = 0; o->ahead && i < bytes; i += 64) __builtin_prefetch(row + i + o->ahead);
}

/* The keys that come next, one of each stream, all of the same head, and that head's row of q. */
struct next_keys {
  const char *key[STREAMS];
  const float *q;
  const int64_t *row, *last; /* of the first stream: after its last token that comes again */
  int apart;                 /* tokens from a stream to the next */
};

INLINE void point_at_token(int streams, const struct in_order *o, struct next_keys *next) {
  next->q = o->q;
  for (int s = 0; s < streams; ++s) next->key[s] = o->k + next->row[s * next->apart];
}

/* Products of the n-th key from here on with its row of q, as sums by lane. */
INLINE vector multiply_key(enum element_type type, int streams, const struct in_order *o, struct next_keys *next,
                           int n) {
  const int step = step_of_type(type);
  vector first = splat(0.0f), second = first;
  const char *key = next->key[n % streams];
  const float *q = next->q, *const end = q + o->floats;
#pragma GCC unroll 1
  do {
    const unit k = load_step(type, key);
    first = multiply_add(k.first, load(q), first);
    if (step > WIDTH) second = multiply_add(k.second, load(q + WIDTH), second);
    key += step * (int)element_size(type), q += step;
  } while (q != end);
  if (streams > 1) ask_ahead(type, o, next->key[n % streams]);
  next->key[n % streams] += o->k_head;
  if (n % streams == streams - 1) {
    next->q = q;
    if (q == o->q + o->heads * o->floats) next->row += next->row < next->last, point_at_token(streams, o, next);
  }
  return step > WIDTH ? (vector)(first + second) : first;
}

/* Sums of keys are folded in pairs as soon as they are there: all at once they would delay the loads that follow. */
#define FOLD(KEYS, HALF, DISTANCE)                                                                                     \
  INLINE vector fold_##KEYS(enum element_type type, int streams, const struct in_order *o, struct next_keys *next,     \
                            int n) {                                                                                   \
    const vector a = HALF(type, streams, o, next, n), b = HALF(type, streams, o, next, n + DISTANCE);                  \
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

/* scores[token][row] of the same number of tokens of each stream. */
INLINE void score_rows(enum element_type type, int streams, const struct in_order *o, int64_t token, int tokens) {
  const int64_t *const row = o->k_rows + token;
  struct next_keys next = {.row = row, .last = row + tokens - 1, .apart = tokens};
  const int count = tokens * o->heads, some = WIDTH / streams;
  point_at_token(streams, o, &next);
  for (int i = 0; i < count; i += some) {
    float lane[WIDTH];
    store(streams == 1 ? o->scores + i : lane, fold_keys(type, streams, o, &next, 0));
    for (int n = 0; streams > 1 && n < WIDTH; ++n)
      if (i + n / streams < count) o->scores[n % streams * count + i + n / streams] = lane[n];
  }
}

/* How many bytes ahead values of one stream are asked for; 0: not. Measured on an AMD EPYC 9004 (Zen 4). */
INLINE int values_ahead(enum element_type type) { return type != FLOAT32 ? 8192 : WIDTH == 16 ? 512 : 0; }

/* sum += weight * value for a head of a token. */
INLINE void add_row(enum element_type type, int streams, const struct in_order *o, const char *v, float weight,
                    float *to) {
  const int step = step_of_type(type);
  const vector factor = splat(weight);
  const float *const end = to + o->floats;
  if (streams > 1) ask_ahead(type, o, v);
#pragma GCC unroll 1
  do {
    const unit u = load_step(type, v);
    if (streams == 1 && values_ahead(type)) __builtin_prefetch(v + values_ahead(type), 0, 2);
    store(to, multiply_add(u.first, factor, load(to)));
    if (step > WIDTH) store(to + WIDTH, multiply_add(u.second, factor, load(to + WIDTH)));
    v += step * (int)element_size(type), to += step;
  } while (to != end);
}

/* sum[stream][row] of as many tokens of each, at most SUM_TOKENS. */
INLINE void add_rows(enum element_type type, int streams, const struct in_order *o, int64_t token, int tokens) {
  for (int t = 0; t < tokens; ++t) {
    const char *v[STREAMS];
    for (int s = 0; s < streams; ++s) v[s] = o->v + o->v_rows[token + s * tokens + t];
    for (int h = 0; h < o->heads; ++h)
      for (int s = 0; s < streams; ++s, v[s - 1] += o->v_head)
        add_row(type, streams, o, v[s], o->scores[(s * tokens + t) * o->heads + h],
                o->sum + (s * o->heads + h) * o->floats);
  }
}

/* One compiled function for each type and pass: a compiler aligns and orders short ones best. */
typedef void pass_function(const struct in_order *o, int64_t token, int tokens);
#define PASS(NAME, CALL)                                                                                               \
  static __attribute__((noinline)) void NAME(const struct in_order *given, int64_t token, int tokens) {                \
    const struct in_order own = *given, *const o = &own; /* what no store can change stays in registers */             \
    CALL;                                                                                                              \
  }
#define PASSES(TYPE)                                                                                                   \
  PASS(score_one_##TYPE, score_rows(TYPE, 1, o, token, tokens))                                                        \
  PASS(score_turns_##TYPE, score_rows(TYPE, STREAMS, o, token, tokens))                                                \
  PASS(score_group_##TYPE, score_group(TYPE, o, token, tokens))                                                        \
  PASS(add_one_##TYPE, add_rows(TYPE, 1, o, token, tokens))                                                            \
  PASS(add_turns_##TYPE, add_rows(TYPE, STREAMS, o, token, tokens))                                                    \
  PASS(add_group_##TYPE, add_group(TYPE, o, token, tokens))
FOR_TYPES(PASSES)
enum { ONE, TURNS, GROUP };
#define OF_TYPES(NAME) {NAME##_FLOAT32, NAME##_FLOAT16, NAME##_BFLOAT16, NAME##_E4M3FN, NAME##_E5M2}
static pass_function *const scores[3][5] = {OF_TYPES(score_one), OF_TYPES(score_turns), OF_TYPES(score_group)};
static pass_function *const sums[3][5] = {OF_TYPES(add_one), OF_TYPES(add_turns), OF_TYPES(add_group)};

/* The next part of a block: how it is passed, how many ranges go through together, and the tokens of each. */
struct part {
  int pass, streams, tokens;
};
static struct part part_at(const struct in_order *o, int64_t begin, int64_t count) {
  const int64_t range = most(count / RANGES, SHORTEST_RANGE), left = count - begin;
  if (o->rows > 1 || o->elements < o->floats) return (struct part){GROUP, 1, (int)least(SUM_TOKENS, left)};
  if (o->streams > 1 && STREAMS * range <= left) return (struct part){TURNS, STREAMS, (int)range};
  return (struct part){ONE, 1, (int)least(range, left)};
}

static void attend_in_order(enum element_type type, const struct in_order *o) {
  const int64_t rows = o->heads * o->rows;
  struct in_order part = *o;
  struct part p;
  for (int64_t token = 0, count; token < o->tokens; token += count) {
    count = least(o->block, o->tokens - token);
    for (int64_t begin = 0; begin < count; begin += p.streams * p.tokens) {
      p = part_at(o, begin, count), part.scores = o->scores + begin * rows;
#if SIMD_AVX512
      if (o->q_bits)
        score_bits(&part, token + begin, p.streams * p.tokens);
      else
#endif
        scores[p.pass][type](&part, token + begin, p.tokens);
    }
    adjust_in_order(o, token, (int)count);
    weigh_in_order(o, (int)count);
    for (int64_t begin = 0; begin < count; begin += p.streams * p.tokens) {
      p = part_at(o, begin, count), part.scores = o->scores + begin * rows;
      memset(o->sum, 0, (size_t)(p.streams * rows * o->floats) * sizeof(float));
      sums[p.pass][type](&part, token + begin, p.tokens);
      for (int64_t r = 0; r < p.streams * rows; ++r) {
        const vector factor = splat(begin || r >= rows ? 1.0f : o->factor[r]);
        float *const to = o->numerator + r % rows * o->floats;
        for (int64_t d = 0; d < o->floats; d += WIDTH)
          store(to + d, multiply_add(load(to + d), factor, load(o->sum + r * o->floats + d)));
      }
    }
  }
}

#endif
