/* The rows of a piece of work attend to its tokens: which of them go through a block together, and on what of it. */
#ifndef TREEATTN_ATTEND_SPAN_H
#define TREEATTN_ATTEND_SPAN_H

#include "attend_in_order.h"
#include "read_order.h"

/* What of a stretch belongs to a piece; nothing where it ends before it begins. */
static struct stretch cut(const struct stretch *s, const struct piece *p) {
  struct stretch within = *s;
  if (s->before < p->begin) within.begin += p->begin - s->before;
  if (s->before + s->end - s->begin > p->end) within.end = s->begin + p->end - s->before;
  within.before = s->before + within.begin - s->begin;
  return within;
}

/* The groups of the rows of a KV head that see something of `count` tokens from `first` on; returns how many. */
static int64_t group_rows(const struct attention *a, const struct state *s, int64_t b, int64_t first, int count) {
  int64_t groups = 0;
  for (int64_t i = 0; i < a->queries; ++i) {
    uint32_t bits = a->visible ? visible_bits(a->visible, b, a->queries, i, first, count) : ALL;
    if (bits == (1u << count) - 1) bits = ALL;
    if (!bits) continue;
    int32_t row = (int32_t)(i * rows_per_query(a)), end = row + (int32_t)rows_per_query(a);
    while (row < end) {
      struct group *last = s->groups + groups - 1;
      if (!groups || last->bits != bits || last->first + last->rows != row || last->rows == MAX_ROWS)
        *(last = s->groups + groups++) = (struct group){row, 0, bits};
      const int32_t rows = (int32_t)least(end - row, MAX_ROWS - last->rows);
      last->rows += rows, row += rows;
    }
  }
  return groups;
}

/* Rows attend to those tokens of a block that `bits` name. */
static void attend_part(const struct block *whole, uint32_t bits, attend_function *attend) {
  struct adjustment adjustment;
  struct block b = *whole;
  if (whole->adjustment) adjustment = *whole->adjustment, b.adjustment = &adjustment;
  const int64_t k_first = whole->k_rows[__builtin_ctz(bits)], v_first = whole->v_rows[__builtin_ctz(bits)];
  b.k += k_first, b.next_k -= k_first;
  b.v += v_first, b.next_v -= v_first;
  b.tokens = __builtin_popcount(bits);
  if (bits >> __builtin_ctz(bits) != (1u << b.tokens) - 1) b.in_row = 0;
  for (int to = 0; to < BLOCK; ++to) {
    const int from = __builtin_ctz(bits);
    b.k_rows[to] = whole->k_rows[from] - k_first;
    b.v_rows[to] = whole->v_rows[from] - v_first;
    if (b.adjustment) adjustment.position[to] = whole->adjustment->position[from];
    if (to + 1 < b.tokens) bits &= bits - 1;
  }
  attend(&b);
}

/* The rows of a group, whose KV head begins at row `first` of the state, attend to a block. */
static void attend_group(const struct attention *a, const struct state *s, struct block *b, int64_t first,
                         const struct group *g) {
  const int64_t row = first + g->first;
  attend_function *const attend = attend_rows[a->order][a->kv_type][g->rows - 1];
  b->q = s->q + row * b->row_floats;
  b->numerator = s->numerator + row * b->row_floats;
  b->denominator = s->denominator + row * WIDTH;
  b->maximum = s->maximum + row;
  if (b->adjustment) b->adjustment->slope = s->slope + row, b->adjustment->base = s->base + row;
  if (g->bits == ALL)
    attend(b);
  else
    attend_part(b, g->bits, attend);
}

static struct span span_of(const struct attention *a, const struct state *state, const struct piece *p,
                           const struct stretch *s) {
  struct span span = {.tokens = s->end - s->begin, .heads = p->heads, .scattered = a->order == SCATTERED && s->uniform};
  span.blocks = block_count(span.scattered, span.tokens);
  span.k = a->k + p->head * a->k_head_stride;
  span.v = a->v + p->head * a->v_head_stride;
  if (a->block_table) {
    span.k_rows = state->k_rows;
    span.v_rows = lie_alike(a) ? state->k_rows : state->v_rows;
    find_rows(a, p->b, s->begin, s->end, 1, state->k_rows);
    if (!lie_alike(a)) find_rows(a, p->b, s->begin, s->end, 0, state->v_rows);
  } else {
    span.k += p->b * a->k_batch_stride + s->begin * a->k_token_stride;
    span.v += p->b * a->v_batch_stride + s->begin * a->v_token_stride;
  }
  return span;
}

/* Rows attend to tokens that lie side by side. `position`: of each, where there is an adjustment. */
static void attend_stretch(const struct attention *a, const struct state *state, const struct piece *p,
                           const struct stretch *stretch, struct adjustment *adjustment, const double *position) {
  const struct span span = span_of(a, state, p, stretch), *const s = &span;
  const int64_t steps = s->blocks * s->heads;
  struct block b = {.head_dim = (int)a->head_dim, .row_floats = (int)row_floats(a), .adjustment = adjustment};
  int64_t groups = group_rows(a, state, p->b, stretch->begin, 1);
  for (int64_t step = 0; step < steps; ++step) {
    const int64_t token = token_at(s, block_at(a, s, step)), left = s->tokens - token;
    point_at_tokens(a, s, token, head_at(a, s, step), (int)least((left + step_of(s) - 1) / step_of(s), BLOCK), &b);
    b.next_k = coming(a, s, step, 1, &b.k_share) - b.k;
    b.next_v = coming(a, s, step, 0, &b.v_share) - b.v;
    if (!stretch->uniform) groups = group_rows(a, state, p->b, stretch->begin + token, b.tokens);
    if (position)
      for (int t = 0; t < BLOCK; ++t) adjustment->position[t] = position[least(token + t * step_of(s), s->tokens - 1)];
    for (int64_t g = 0; g < groups; ++g)
      attend_group(a, state, &b, head_at(a, s, step) * rows_per_kv_head(a), state->groups + g);
  }
}

/* The position of the token nearest to each query, among those of a piece that it sees: which of them weighs most. */
static void find_base(const struct attention *a, const struct state *s, const struct piece *p, int64_t query) {
  double low = 0, high = 0;
  int any = 0;
  for (int64_t i = 0; i < p->count; ++i) {
    const struct stretch c = cut(p->stretches + i, p);
    const double *position = s->position + c.before - p->begin;
    for (int64_t token = c.begin; token < c.end; token += BLOCK, position += BLOCK) {
      const int64_t count = least(c.end - token, BLOCK);
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

/* Whether the rows of all queries see a token. */
static int all_see(const struct attention *a, int64_t b, int64_t token) {
  for (int64_t i = 0; a->visible && i < a->queries; ++i)
    if (!visible_bits(a->visible, b, a->queries, i, token, 1)) return 0;
  return 1;
}

/* All of a piece. */
static void attend_tokens(const struct attention *a, const struct state *s, const struct piece *p) {
  const int alibi = a->visible && a->visible->slopes, adjusted = alibi || (a->visible && a->visible->softcap > 0);
  struct adjustment adjustment = {.softcap = a->visible ? a->visible->softcap : 0, .alibi = alibi};
  prepare(a, s, p);
  if (alibi) prepare_positions(a, s, p);
  for (int64_t i = 0; i < p->count; ++i) {
    const struct stretch c = cut(p->stretches + i, p);
    if (c.begin >= c.end) continue;
    if (c.uniform && !adjusted && can_read_in_order(a) && all_see(a, p->b, c.begin))
      attend_uniform(a, s, p, c.begin, c.end);
    else
      attend_stretch(a, s, p, &c, adjusted ? &adjustment : NULL, alibi ? s->position + c.before - p->begin : NULL);
  }
}

#endif
