/* The rows of a piece of tiled attention: their memory, and which tokens they see. */
#ifndef TREEATTN_TILE_ROWS_H
#define TREEATTN_TILE_ROWS_H

#include "attend_tile.h"
#include "rows.h"
#include "token_rows.h"

enum {
  CHUNK = 21 * BLOCK,
  PIECE_PANELS = 8,
  RANGES = 3, /* of a query: two intervals and the drafts */
};

/* Tokens of the shard from `begin` to `end`. */
struct range {
  int64_t begin, end;
};

/* One thread's memory. */
struct state {
  float *q;         /* [panels][key_floats][PANEL] */
  float *numerator; /* [rows][value_floats] */
  float *maximum, *denominator, *slope, *distance;
  float *keys, *values; /* packed as in struct tokens */
  float *scores;        /* [BLOCK][PANEL] */
  float *row;           /* one on its way in or out */
  uint64_t *seen;
  double *base; /* position from which a row's distances are counted */
};

/* Rows first..first + rows of one KV head of one batch row. */
struct piece {
  const struct attention *a;
  struct state s;
  int64_t b, kv_head, first, rows;
  struct range reach[RANGES];        /* what lies outside no row sees */
  struct range common[PIECE_PANELS]; /* what lies inside all rows of a panel see */
};

static int64_t pieces_per_kv_head(const struct attention *a) {
  return quotient_up(rows_per_kv_head(a), PIECE_PANELS * PANEL);
}

/* Whole panels of rows; the last piece may have fewer. */
static int64_t piece_rows(const struct attention *a) {
  return quotient_up(quotient_up(rows_per_kv_head(a), pieces_per_kv_head(a)), PANEL) * PANEL;
}

static int64_t packed_floats(int64_t elements) { return quotient_up(elements, SEGMENT) * PACKED; }

/* Cuts `count` floats off what lies at `at`, in whole lines of the cache. */
static float *cut(uintptr_t *at, int64_t count) {
  float *begin = (float *)*at;
  *at += (uintptr_t)(quotient_up(count, 16) * 16) * sizeof(float);
  return begin;
}

static struct state state_at(const struct attention *a, uintptr_t *at) {
  const int64_t rows = piece_rows(a);
  struct state s;
  s.q = cut(at, rows * whole_units(a->head_dim));
  s.numerator = cut(at, rows * whole_units(a->v_dim));
  s.maximum = cut(at, rows);
  s.denominator = cut(at, rows);
  s.slope = cut(at, rows);
  s.distance = cut(at, rows);
  s.keys = cut(at, packed_floats(a->head_dim));
  s.values = cut(at, packed_floats(a->v_dim));
  s.scores = cut(at, BLOCK * PANEL);
  s.row = cut(at, most(whole_units(a->head_dim), record_width(a)));
  s.seen = (uint64_t *)cut(at, 2 * rows);
  s.base = (double *)cut(at, 2 * rows);
  return s;
}

static int64_t state_bytes(const struct attention *a) {
  uintptr_t end = 0;
  state_at(a, &end);
  return (int64_t)end;
}

static int64_t query_of(const struct piece *p, int64_t r) { return (p->first + r) % p->a->queries; }
static int64_t head_of(const struct piece *p, int64_t r) {
  return p->kv_head * (p->a->heads / p->a->kv_heads) + (p->first + r) / p->a->queries;
}

/* The tokens that a query sees: those of two intervals; draft tokens are in the third, some of them. */
static struct range range_of(const struct attention *a, int64_t b, int64_t query, int which) {
  const struct visible *v = a->visible;
  if (!v) return (struct range){0, which == 1 ? (a->lengths ? a->lengths[b] : a->tokens) : 0};
  if (which == 2) return (struct range){v->draft_begins[b], v->draft_begins[b] + v->drafts};
  const int64_t *ends = v->intervals + (b * a->queries + query) * 4 + 2 * which;
  return (struct range){ends[0], ends[1]};
}

/* What rows see together, and what all of a panel see. */
static void find_ranges(struct piece *p) {
  for (int i = 0; i < RANGES; ++i) p->reach[i] = (struct range){INT64_MAX, 0};
  for (int64_t r = 0; r < p->rows; ++r) {
    for (int i = 0; i < RANGES; ++i) {
      const struct range seen = range_of(p->a, p->b, query_of(p, r), i);
      if (seen.begin >= seen.end) continue;
      p->reach[i].begin = least(p->reach[i].begin, seen.begin);
      p->reach[i].end = most(p->reach[i].end, seen.end);
    }
    const struct range last = range_of(p->a, p->b, query_of(p, r), 1);
    struct range *common = p->common + r / PANEL;
    if (r % PANEL == 0) *common = last;
    *common = (struct range){most(common->begin, last.begin), least(common->end, last.end)};
  }
}

/* The first block from `token` on, a multiple of BLOCK, that any row may see; `end` if there is none before. */
static int64_t next_block(const struct piece *p, int64_t token, int64_t end) {
  int64_t next = end;
  for (int i = 0; i < RANGES; ++i)
    if (token < p->reach[i].end) next = least(next, most(token, p->reach[i].begin / BLOCK * BLOCK));
  return next;
}

static double position_of(const struct piece *p, int64_t token) {
  double position;
  find_positions(p->a->visible, p->b, token, token + 1, &position);
  return position;
}

/* The row's place among the tokens that it sees: from far away all distances would be alike in float32. */
static double base_of(const struct piece *p, int64_t r) {
  const struct visible *v = p->a->visible;
  const int64_t query = query_of(p, r);
  const struct range lead = range_of(p->a, p->b, query, 0), rest = range_of(p->a, p->b, query, 1);
  double base = (double)v->q_positions[p->b * p->a->queries + query];
  if (lead.begin >= lead.end && rest.begin >= rest.end) return base; /* drafts at most */
  const double lowest = position_of(p, lead.begin < lead.end ? lead.begin : rest.begin);
  const double highest = position_of(p, (rest.begin < rest.end ? rest.end : lead.end) - 1);
  return base < lowest ? lowest : base > highest ? highest : base;
}

/* Queries of a piece's rows; sums emptied. */
static void prepare(struct piece *p) {
  const struct attention *a = p->a;
  const struct state *s = &p->s;
  const int64_t floats = whole_units(a->head_dim), rows = quotient_up(p->rows, PANEL) * PANEL;
  const float scale = a->scale * scale_of(a, a->k_scale, p->kv_head);
  memset(s->q, 0, (size_t)(rows * floats) * sizeof(float));
  memset(s->seen, 0, (size_t)rows * sizeof *s->seen);
  memset(s->slope, 0, (size_t)rows * sizeof(float));
  memset(s->distance, 0, (size_t)rows * sizeof(float));
  for (int64_t r = 0; r < p->rows; ++r) {
    const char *from = a->q + p->b * a->q_batch_stride + query_of(p, r) * a->q_query_stride;
    widen_query(a, from + head_of(p, r) * a->q_head_stride, scale, s->row);
    float *to = s->q + r / PANEL * PANEL * floats + r % PANEL;
    for (int64_t d = 0; d < floats; ++d) to[d * PANEL] = s->row[d];
    if (a->visible && a->visible->slopes) {
      s->slope[r] = (float)a->visible->slopes[head_of(p, r)];
      s->base[r] = base_of(p, r);
    }
  }
}

static void empty(const struct piece *p) {
  const struct state *s = &p->s;
  const int64_t rows = quotient_up(p->rows, PANEL) * PANEL;
  for (int64_t r = 0; r < rows; ++r) s->maximum[r] = -INFINITY, s->denominator[r] = 0.0f;
  memset(s->numerator, 0, (size_t)(p->rows * whole_units(p->a->v_dim)) * sizeof(float));
}

/* Bits begin..end of the BLOCK that there are. */
static uint64_t bits_between(int64_t begin, int64_t end) {
  begin = most(begin, 0), end = least(end, BLOCK);
  return begin < end ? ~UINT64_C(0) >> (64 - (end - begin)) << begin : 0;
}

/* first: draft token number of the block's first token. */
static uint64_t draft_bits(const struct visible *v, int64_t row, int64_t first) {
  const uint32_t *mask = v->mask + row * v->mask_words;
  uint64_t bits = 0;
  for (int64_t j = most(first, 0); j < least(first + BLOCK, v->drafts); ++j)
    bits |= (uint64_t)(mask[j / 32] >> j % 32 & 1) << (j - first);
  return bits;
}

/* Which tokens of a block row `r` sees. */
static uint64_t seen_bits(const struct piece *p, int64_t r, int64_t token) {
  const int64_t query = query_of(p, r);
  uint64_t bits = 0;
  for (int i = 0; i < 2; ++i) {
    const struct range seen = range_of(p->a, p->b, query, i);
    bits |= bits_between(seen.begin - token, seen.end - token);
  }
  const struct range drafts = p->reach[2];
  if (token < drafts.end && token + BLOCK > drafts.begin)
    bits |= draft_bits(p->a->visible, p->b * p->a->queries + query, token - drafts.begin);
  return bits;
}

/* Fills `seen` for a block; returns which of its tokens any row sees. */
static uint64_t look(const struct piece *p, int64_t token) {
  uint64_t any = 0;
  for (int64_t r = 0; r < p->rows; ++r) {
    const struct range common = p->common[r / PANEL];
    const int whole = common.begin <= token && token + BLOCK <= common.end;
    any |= p->s.seen[r] = whole ? bits_between(0, BLOCK) : seen_bits(p, r, token);
  }
  return any;
}

/* Distances of the tokens any row sees, counted from the first of them. */
static void measure(const struct piece *p, int64_t token, uint64_t any, float *offset) {
  const struct visible *v = p->a->visible;
  double position[BLOCK] = {0};
  const int begin = __builtin_ctzll(any), end = 64 - __builtin_clzll(any);
  const int drafts = (int)most(begin, least(end, v->drafts ? v->draft_begins[p->b] - token : end));
  find_positions(v, p->b, token + begin, token + drafts, position + begin);
  if (drafts < end) find_positions(v, p->b, token + drafts, token + end, position + drafts);
  for (int t = begin; t < end; ++t) offset[t] = (float)(position[t] - position[begin]);
  for (int64_t r = 0; r < p->rows; ++r) p->s.distance[r] = (float)(p->s.base[r] - position[begin]);
}

#endif
