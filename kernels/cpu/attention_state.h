/* What a thread sums up in a piece of work: the rows that attend, and how they become records.
 *
 * Rows are query heads with their queries. Those that share a KV head are neighbours, and so are those of one query
 * among them, which see the same. */
#ifndef TREEATTN_ATTENTION_STATE_H
#define TREEATTN_ATTENTION_STATE_H

#include "rows.h"
#include "token_rows.h"

enum { CHUNK = 1008 }; /* tokens of a piece of work, at most */

/* Of tokens that are read in the order of memory, those whose values are added one by one, at most: 512 would break the
 * promise of exactness for equal scores and values. */
enum { SUM_TOKENS = 128 };

/* Tokens of a block, keys first and then values. Larger blocks change less often between the two. */
enum { BLOCK_TOKENS = 512 };

/* How a cache is read: as one stream, or from STREAMS places in turn, where lines are asked for or not. Which way is
 * the fastest is a property of the processor; results have the same bits. */
enum way { ONE_STREAM = 0, IN_TURN = 1, IN_TURN_AHEAD = 2 };
enum { STREAMS = 4, BYTES_AHEAD = 1024 };
enum { SEEN_TOGETHER = 16 }; /* tokens that visible_bits() is asked for at once */

/* Tokens begin..end of those that stretches of a batch row hold together, and some KV heads. */
struct piece {
  int64_t b, head, heads, begin, end, count;
  const struct stretch *stretches; /* [count] */
};

/* What a thread sums up: all rows of a range of KV heads. */
struct state {
  float *q, *numerator;        /* [rows][row_floats], in unit order */
  float *denominator;          /* [rows][WIDTH]: sums by lane */
  float *maximum;              /* [rows] */
  double *slope, *base, *time; /* [rows], for ALiBi: see in_order.h; time: the query's position */
  double *position, *listed;   /* [CHUNK], for ALiBi: of a piece's tokens; of those that are read now */
  int64_t *k_rows, *v_rows;    /* [CHUNK]: where those are */
  float *sum, *factor;         /* [STREAMS][rows][row_floats], [rows]; these and the next: see attend_in_order.h */
  uint16_t *q_bits;            /* [rows][row_floats] */
  float *scores, *lanes;       /* [tokens_in_order()][rows], [rows][WIDTH] */
};

static int64_t row_floats(const struct attention *a) { return whole_units(a->head_dim); }
static int64_t rows_per_query(const struct attention *a) { return a->heads / a->kv_heads; }

/* Tokens of a block: the same for all pieces. Scores of many rows are to fit the second cache. */
static int64_t tokens_in_order(const struct attention *a) {
  return a->heads * a->queries > 64 ? SUM_TOKENS : BLOCK_TOKENS;
}

/* Whether scores can come from bfloat16 as it is: see attend_group.h. */
static int can_take_bits(const struct attention *a) {
#if SIMD_AVX512
  return rows_per_kv_head(a) > 1 && a->q_type == BFLOAT16 && a->kv_type == BFLOAT16 && !a->k_scale &&
         a->head_dim % UNIT == 0 && __builtin_cpu_supports("avx512bf16");
#else
  (void)a;
  return 0;
#endif
}

/* Of a row, counted over all KV heads. */
static int64_t query_of(const struct attention *a, int64_t row) {
  return row % rows_per_kv_head(a) / rows_per_query(a);
}
static int64_t head_of(const struct attention *a, int64_t row) {
  return row / rows_per_kv_head(a) * rows_per_query(a) + row % rows_per_query(a);
}

/* The next part of a memory, of which `at` bytes are given away. */
static void *take(char *memory, int64_t *at, int64_t bytes) {
  void *part = memory ? memory + *at : NULL;
  *at += (bytes + 63) / 64 * 64;
  return part;
}

/* The parts of a state in a memory, or what they would be; returns how many bytes they take. */
static int64_t lay_out(const struct attention *a, char *memory, struct state *s) {
  const int64_t rows = a->heads * a->queries, floats = rows * row_floats(a), size = (int64_t)sizeof(float);
  int64_t at = 0;
  s->q = take(memory, &at, floats * size);
  s->numerator = take(memory, &at, floats * size);
  s->denominator = take(memory, &at, rows * WIDTH * size);
  s->maximum = take(memory, &at, rows * size);
  s->k_rows = take(memory, &at, CHUNK * (int64_t)sizeof(int64_t));
  s->v_rows = take(memory, &at, CHUNK * (int64_t)sizeof(int64_t));
  s->sum = take(memory, &at, STREAMS * floats * size);
  s->factor = take(memory, &at, rows * size);
  s->scores = take(memory, &at, (tokens_in_order(a) * rows + WIDTH) * size);
  s->lanes = take(memory, &at, rows * WIDTH * size);
  if (can_take_bits(a)) s->q_bits = take(memory, &at, floats * (int64_t)sizeof(uint16_t));
  if (!a->visible) return at;
  s->slope = take(memory, &at, rows * (int64_t)sizeof(double));
  s->base = take(memory, &at, rows * (int64_t)sizeof(double));
  s->time = take(memory, &at, rows * (int64_t)sizeof(double));
  s->position = take(memory, &at, CHUNK * (int64_t)sizeof(double));
  s->listed = take(memory, &at, CHUNK * (int64_t)sizeof(double));
  return at;
}

static int64_t state_bytes(const struct attention *a) {
  struct state s;
  return lay_out(a, NULL, &s);
}

static struct state state_of(const struct attention *a, int worker) {
  struct state s = {0};
  lay_out(a, (char *)a->workspace + worker * state_bytes(a), &s);
  return s;
}

/* Where a row's q lies. */
static const char *query_at(const struct attention *a, int64_t b, int64_t row) {
  return a->q + b * a->q_batch_stride + query_of(a, row) * a->q_query_stride + head_of(a, row) * a->q_head_stride;
}

/* Queries of the rows of a piece; sums emptied. */
static void prepare(const struct attention *a, const struct state *s, const struct piece *p) {
  const int64_t floats = row_floats(a), first = p->head * rows_per_kv_head(a), count = p->heads * rows_per_kv_head(a);
  for (int64_t r = 0; r < count; ++r) {
    const float scale = a->scale * scale_of(a, a->k_scale, (first + r) / rows_per_kv_head(a));
    widen_query(a, query_at(a, p->b, first + r), scale, s->q + r * floats);
    s->maximum[r] = -INFINITY;
  }
  memset(s->numerator, 0, (size_t)(count * floats) * sizeof(float));
  memset(s->denominator, 0, (size_t)(count * WIDTH) * sizeof(float));
}

/* A row's maximum with all of its ALiBi, which is -slope * (time - position). The digits of it that float32 cannot hold
 * are not lost: the row's sums take them as a factor. */
static float whole_maximum(const struct attention *a, const struct state *s, int64_t r, float *factor) {
  if (!a->visible || !a->visible->slopes) return s->maximum[r];
  enum { LARGEST_EXPONENT = 64 };
  const double whole = s->maximum[r] + s->slope[r] * (s->base[r] - s->time[r]), rest = whole - (float)whole;
  if (rest > -LARGEST_EXPONENT && rest < LARGEST_EXPONENT) *factor = (float)exp(rest);
  return (float)whole;
}

static void write_record(const struct attention *a, const struct state *s, int64_t r, float v_scale, float *record) {
  const float denominator = sum_lanes(load(s->denominator + r * WIDTH));
  float factor = 1.0f;
  const float maximum = whole_maximum(a, s, r, &factor);
  write_row(a, maximum, denominator, factor, v_scale, s->numerator + r * row_floats(a), record);
}

/* The rows of a piece, to the records of their batch row. */
static void write_records(const struct attention *a, const struct state *s, const struct piece *p, float *records) {
  const int64_t first = p->head * rows_per_kv_head(a), count = p->heads * rows_per_kv_head(a);
  for (int64_t r = 0; r < count; ++r) {
    const int64_t head = head_of(a, first + r);
    write_record(a, s, r, scale_of(a, a->v_scale, head / rows_per_query(a)),
                 records + (head * a->queries + query_of(a, first + r)) * record_width(a));
  }
}

#endif
