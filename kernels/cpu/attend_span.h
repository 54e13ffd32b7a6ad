/* The rows of a piece of work attend to its tokens: which of them go through a block together, and on what of it. */
#ifndef TREEATTN_ATTEND_SPAN_H
#define TREEATTN_ATTEND_SPAN_H

#include <stdlib.h>

#include "attend_in_order.h"

/* What of a stretch belongs to a piece; nothing where it ends before it begins. */
static struct stretch cut(const struct stretch *s, const struct piece *p) {
  struct stretch within = *s;
  if (s->before < p->begin) within.begin += p->begin - s->before;
  if (s->before + s->end - s->begin > p->end) within.end = s->begin + p->end - s->before;
  within.before = s->before + within.begin - s->begin;
  return within;
}

static int sees(const struct attention *a, int64_t b, int64_t query, int64_t token) {
  return !a->visible || visible_bits(a->visible, b, a->queries, query, token, 1);
}

/* Lists the tokens of a stretch that a query sees. Returns how many. */
static int64_t list_tokens(const struct attention *a, const struct state *s, const struct piece *p,
                           const struct stretch *c, int64_t query, const double *position) {
  const int64_t tokens = c->end - c->begin;
  int64_t count = 0;
  find_rows(a, p->b, c->begin, c->end, 1, s->k_rows);
  find_rows(a, p->b, c->begin, c->end, 0, s->v_rows);
  if (position) memcpy(s->listed, position, (size_t)tokens * sizeof *position);
  if (c->uniform) return tokens;
  for (int64_t i = 0; i < tokens; i += SEEN_TOGETHER) {
    const int64_t some = least(SEEN_TOGETHER, tokens - i);
    uint32_t bits = visible_bits(a->visible, p->b, a->queries, query, c->begin + i, some);
    for (; bits; bits &= bits - 1, ++count) {
      const int64_t seen = i + __builtin_ctz(bits);
      s->k_rows[count] = s->k_rows[seen], s->v_rows[count] = s->v_rows[seen];
      if (position) s->listed[count] = position[seen];
    }
  }
  return count;
}

/* The rows of some queries attend to the `tokens` that are listed: all heads together where a token's heads are
 * neighbours in memory, head by head where a head's tokens are, or where a head's rows are not all. */
static void attend_listed(const struct attention *a, const struct state *s, const struct piece *p, int64_t query,
                          int64_t queries, int64_t tokens, int in_row, const uint16_t *bits) {
  const int near = llabs(a->k_head_stride) > llabs(a->k_token_stride), whole = queries == a->queries;
  const int64_t together = near || !whole ? 1 : p->heads, step = whole ? tokens : SUM_TOKENS; /* by no stride */
  const int alibi = a->visible && a->visible->slopes;
  for (int64_t begin = 0; begin < tokens; begin += step)
    for (int64_t head = 0; head < p->heads; head += together) {
      const int64_t row = head * rows_per_kv_head(a) + query * rows_per_query(a);
      const struct in_order o = {.heads = (int)together,
                                 .rows = (int)(queries * rows_per_query(a)),
                                 .streams = a->way == ONE_STREAM ? 1 : STREAMS,
                                 .ahead = a->way == IN_TURN_AHEAD ? BYTES_AHEAD : 0,
                                 .listed = !in_row,
                                 .tokens = least(step, tokens - begin),
                                 .block = tokens_in_order(a),
                                 .elements = a->head_dim,
                                 .floats = row_floats(a),
                                 .k = a->k + (p->head + head) * a->k_head_stride,
                                 .v = a->v + (p->head + head) * a->v_head_stride,
                                 .k_head = a->k_head_stride,
                                 .v_head = a->v_head_stride,
                                 .k_token = a->k_token_stride,
                                 .v_token = a->v_token_stride,
                                 .k_rows = s->k_rows + begin,
                                 .v_rows = s->v_rows + begin,
                                 .q = s->q + row * row_floats(a),
                                 .q_bits = bits ? bits + row * row_floats(a) : NULL,
                                 .scale = a->scale,
                                 .numerator = s->numerator + row * row_floats(a),
                                 .sum = s->sum,
                                 .maximum = s->maximum + row,
                                 .denominator = s->denominator + row * WIDTH,
                                 .factor = s->factor,
                                 .scores = s->scores,
                                 .lanes = s->lanes,
                                 .softcap = a->visible ? a->visible->softcap : 0.0f,
                                 .slope = alibi ? s->slope + row : NULL,
                                 .base = alibi ? s->base + row : NULL,
                                 .position = alibi ? s->listed + begin : NULL};
      attend_in_order(a->kv_type, &o);
    }
}

/* Rows attend to a stretch: neighbouring queries together where they see all of it. */
static void attend_stretch(const struct attention *a, const struct state *s, const struct piece *p,
                           const struct stretch *c, const double *position, const uint16_t *bits) {
  for (int64_t query = 0, end; query < a->queries; query = end) {
    for (end = query; c->uniform && end < a->queries && sees(a, p->b, end, c->begin); ++end) continue;
    const int seen = !c->uniform || end > query;
    if (end == query) ++end;
    const int64_t tokens = seen ? list_tokens(a, s, p, c, query, position) : 0;
    const int in_row = c->uniform && !a->block_table;
    if (tokens) attend_listed(a, s, p, query, end - query, tokens, in_row, bits);
  }
}

/* The position of the token nearest to each query, among those of a piece that it sees: which of them weighs most. */
static void find_base(const struct attention *a, const struct state *s, const struct piece *p, int64_t query) {
  double low = 0, high = 0;
  int any = 0;
  for (int64_t i = 0; i < p->count; ++i) {
    const struct stretch c = cut(p->stretches + i, p);
    const double *position = s->position + c.before - p->begin;
    for (int64_t token = c.begin; token < c.end; token += SEEN_TOGETHER, position += SEEN_TOGETHER) {
      const int64_t count = least(c.end - token, SEEN_TOGETHER);
      const uint32_t bits = visible_bits(a->visible, p->b, a->queries, query, token, count);
      if (bits && !any++) low = position[__builtin_ctz(bits)];
      if (bits) high = position[31 - __builtin_clz(bits)];
    }
  }
  const int64_t first = p->head * rows_per_kv_head(a), count = p->heads * rows_per_kv_head(a);
  for (int64_t r = 0; r < count; ++r)
    if (query_of(a, first + r) == query) s->base[r] = s->slope[r] < 0 ? low : high;
}

/* For ALiBi: positions of a piece's tokens, and of its rows the slopes and what distances are measured from. */
static void prepare_positions(const struct attention *a, const struct state *s, const struct piece *p) {
  const int64_t first = p->head * rows_per_kv_head(a), count = p->heads * rows_per_kv_head(a);
  for (int64_t r = 0; r < count; ++r) {
    s->slope[r] = a->visible->slopes[head_of(a, first + r)];
    s->time[r] = (double)a->visible->q_positions[p->b * a->queries + query_of(a, first + r)];
  }
  for (int64_t i = 0; i < p->count; ++i) {
    const struct stretch c = cut(p->stretches + i, p);
    if (c.begin < c.end) find_positions(a->visible, p->b, c.begin, c.end, s->position + c.before - p->begin);
  }
  for (int64_t i = 0; i < a->queries; ++i) find_base(a, s, p, i);
}

/* All of a piece. */
static void attend_tokens(const struct attention *a, const struct state *s, const struct piece *p) {
  const int alibi = a->visible && a->visible->slopes;
  const uint16_t *bits = NULL;
  prepare(a, s, p);
  if (alibi) prepare_positions(a, s, p);
#if SIMD_AVX512
  if (can_take_bits(a) && take_bits(a, p, s->q_bits)) bits = s->q_bits;
#endif
  for (int64_t i = 0; i < p->count; ++i) {
    const struct stretch c = cut(p->stretches + i, p);
    if (c.begin < c.end) attend_stretch(a, s, p, &c, alibi ? s->position + c.before - p->begin : NULL, bits);
  }
}

#endif
