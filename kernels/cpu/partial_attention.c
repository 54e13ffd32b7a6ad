/* Attention of a few queries over many cached tokens, in one pass over the cache, as records.
 *
 * Tokens are taken in blocks of BLOCK: scores, online softmax, weighted sum of values. Query rows
 * that share a KV head go through the registers together, so each key and value is loaded once for
 * up to MAX_ROWS rows. Sums are kept short for accuracy: a block is summed on its own, at most
 * CHUNK / BLOCK blocks make a chunk, and the partials of chunks are merged in ascending order. */
#include "partial_attention.h"

#include <stdlib.h>

#include "records.h"
#include "simd.h"

enum { BLOCK = 16, CHUNK = 1024, MAX_ROWS = 4, MAX_TOKENS = 8, MAX_UNITS = 4 };

/* Rows that attend to one block of tokens of one KV head. */
struct block {
  const char *k, *v;           /* the first token's row */
  int64_t k_stride, v_stride;  /* bytes to the next token */
  const char *next_k, *next_v; /* the block that comes after this one: prefetched meanwhile */
  int tokens;                  /* 1..BLOCK */
  int head_dim, row_floats;    /* row_floats: head_dim rounded up to whole units */
  const float *q;              /* [rows][row_floats], scaled, in unit order */
  float *numerator;            /* [rows][row_floats], in unit order */
  float *maximum, *denominator;
};

INLINE void prefetch_row(const char *row, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i);
}

/* scores[row][token] = q[row] . k[token] for a few tokens at `k`. */
INLINE void score_tokens(enum element_type type, int rows, int tokens, const struct block *b, const char *k,
                         float (*scores)[BLOCK]) {
  vector sum[MAX_ROWS][MAX_TOKENS];
  for (int r = 0; r < rows; ++r)
    for (int t = 0; t < tokens; ++t) sum[r][t] = splat(0.0f);
  for (int d = 0; d < b->row_floats; d += UNIT) {
    unit key[MAX_TOKENS];
    const int whole = b->head_dim - d >= UNIT;
    for (int t = 0; t < tokens; ++t) {
      const char *from = k + t * b->k_stride + (size_t)d * element_size(type);
      key[t] = whole ? load_unit(type, from) : load_part(type, from, b->head_dim - d);
    }
    for (int r = 0; r < rows; ++r) {
      const float *q = b->q + (size_t)r * b->row_floats + d;
      const vector first = load(q), second = load(q + WIDTH);
      for (int t = 0; t < tokens; ++t) sum[r][t] = multiply_add(key[t].first, first, sum[r][t]);
      for (int t = 0; t < tokens; ++t) sum[r][t] = multiply_add(key[t].second, second, sum[r][t]);
    }
  }
  for (int r = 0; r < rows; ++r)
    for (int t = 0; t < tokens; ++t) scores[r][t] = sum_lanes(sum[r][t]);
}

INLINE void score_block(enum element_type type, int rows, const struct block *b, float (*scores)[BLOCK]) {
  const int together = rows == 1 ? MAX_TOKENS : MAX_TOKENS / 2;
  const size_t row_bytes = (size_t)b->head_dim * element_size(type);
  int t = 0;
  for (; t + together <= b->tokens; t += together) {
    for (int i = 0; i < together; ++i) prefetch_row(b->next_k + (t + i) * b->k_stride, row_bytes);
    score_tokens(type, rows, together, b, b->k + t * b->k_stride, (float(*)[BLOCK])(scores[0] + t));
  }
  for (; t < b->tokens; ++t)
    score_tokens(type, rows, 1, b, b->k + t * b->k_stride, (float(*)[BLOCK])(scores[0] + t));
  for (int r = 0; r < rows; ++r)
    for (int i = b->tokens; i < BLOCK; ++i) scores[r][i] = -INFINITY;
}

/* Scores to weights exp(score - maximum), in place. Returns the factor for what was summed before. */
INLINE float weigh_block(float *scores, float *maximum, float *denominator) {
  vector lane[BLOCK / WIDTH], highest, sum = splat(0.0f);
  for (int i = 0; i < BLOCK / WIDTH; ++i) lane[i] = load(scores + i * WIDTH);
  highest = lane[0];
  for (int i = 1; i < BLOCK / WIDTH; ++i) highest = larger(highest, lane[i]);
  const float block_maximum = largest_lane(highest);
  float factor = 1.0f;
  if (block_maximum > *maximum) {
    factor = exponential(*maximum - block_maximum);
    *maximum = block_maximum;
  }
  const float base = *maximum == -INFINITY ? 0.0f : *maximum; /* -inf - -inf would be NaN */
  for (int i = 0; i < BLOCK / WIDTH; ++i) {
    lane[i] = exponential_lanes(lane[i] - base);
    store(scores + i * WIDTH, lane[i]);
    sum += lane[i];
  }
  *denominator = *denominator * factor + sum_lanes(sum);
  return factor;
}

/* numerator = factor * numerator + weights . v, for `units` units from element d on. */
INLINE void add_values(enum element_type type, int rows, int units, int part, const struct block *b, int d,
                       float (*weights)[BLOCK], const float *factor) {
  vector sum[MAX_ROWS][2 * MAX_UNITS];
  for (int r = 0; r < rows; ++r)
    for (int u = 0; u < 2 * units; ++u) sum[r][u] = splat(0.0f);
  for (int t = 0; t < b->tokens; ++t) {
    const char *from = b->v + t * b->v_stride + (size_t)d * element_size(type);
    unit value[MAX_UNITS];
    for (int u = 0; u < units; ++u)
      value[u] = part ? load_part(type, from, part) : load_unit(type, from + u * UNIT * element_size(type));
    for (int r = 0; r < rows; ++r) {
      const vector weight = splat(weights[r][t]);
      for (int u = 0; u < units; ++u) {
        sum[r][2 * u] = multiply_add(value[u].first, weight, sum[r][2 * u]);
        sum[r][2 * u + 1] = multiply_add(value[u].second, weight, sum[r][2 * u + 1]);
      }
    }
  }
  for (int r = 0; r < rows; ++r)
    for (int u = 0; u < 2 * units; ++u) {
      float *to = b->numerator + (size_t)r * b->row_floats + d + u * WIDTH;
      store(to, multiply_add(load(to), splat(factor[r]), sum[r][u]));
    }
}

INLINE void attend_rows(enum element_type type, int rows, const struct block *b) {
  _Alignas(64) float scores[MAX_ROWS][BLOCK];
  float factor[MAX_ROWS];
  score_block(type, rows, b, scores);
  for (int r = 0; r < rows; ++r) factor[r] = weigh_block(scores[r], b->maximum + r, b->denominator + r);
  const size_t row_bytes = (size_t)b->head_dim * element_size(type);
  for (int t = 0; t < b->tokens; ++t) prefetch_row(b->next_v + t * b->v_stride, row_bytes);
  const int together = rows == 1 ? MAX_UNITS : MAX_UNITS / 2;
  int d = 0;
  for (; d + together * UNIT <= b->head_dim; d += together * UNIT)
    add_values(type, rows, together, 0, b, d, scores, factor);
  for (; d + UNIT <= b->head_dim; d += UNIT) add_values(type, rows, 1, 0, b, d, scores, factor);
  if (d < b->head_dim) add_values(type, rows, 1, b->head_dim - d, b, d, scores, factor);
}

/* One compiled function for each type and number of rows: the compiler unrolls and keeps sums in registers. */
typedef void attend_function(const struct block *b);
#define ATTEND(TYPE, ROWS) \
  static void attend_##TYPE##_##ROWS(const struct block *b) { attend_rows(TYPE, ROWS, b); }
#define ATTEND_ROWS(TYPE) ATTEND(TYPE, 1) ATTEND(TYPE, 2) ATTEND(TYPE, 3) ATTEND(TYPE, 4)
ATTEND_ROWS(FLOAT32)
ATTEND_ROWS(FLOAT16)
ATTEND_ROWS(BFLOAT16)
#define NAMES(TYPE) {attend_##TYPE##_1, attend_##TYPE##_2, attend_##TYPE##_3, attend_##TYPE##_4}
static attend_function *const attend[3][MAX_ROWS] = {NAMES(FLOAT32), NAMES(FLOAT16), NAMES(BFLOAT16)};

/* The state of one piece of work: all rows of a range of KV heads. */
struct state {
  float *q, *numerator; /* [rows][row_floats] */
  float *maximum, *denominator;
};

static int64_t row_floats(const struct attention *a) { return (a->head_dim + UNIT - 1) / UNIT * UNIT; }
static int64_t rows_per_kv_head(const struct attention *a) { return a->heads / a->kv_heads * a->queries; }
static int64_t record_count(const struct attention *a) { return a->batch * a->heads * a->queries; }
static int64_t chunk_count(int64_t tokens) { return tokens > CHUNK ? (tokens + CHUNK - 1) / CHUNK : 1; }

static int64_t state_floats(const struct attention *a) {
  int64_t rows = a->heads * a->queries;
  return (rows * (2 * row_floats(a) + 2) + 15) / 16 * 16;
}

int64_t attention_workspace(const struct attention *a) {
  int64_t partials = (chunk_count(a->tokens) - 1) * record_count(a) * (a->head_dim + RECORD_NUMERATOR);
  return (int64_t)sizeof(float) * (state_floats(a) + partials);
}

static float element(enum element_type type, const char *from, int64_t index) {
  if (type == FLOAT32) {
    float value;
    memcpy(&value, from + 4 * index, sizeof value);
    return value;
  }
  uint16_t bits;
  memcpy(&bits, from + 2 * index, sizeof bits);
  if (type == BFLOAT16) return float_from_bits((uint32_t)bits << 16);
  vector_half half = {bits};
  return widen_half_portably(half)[0];
}

/* q of the rows first..first + count of a batch row, scaled, in unit order, padded with 0; sums emptied. */
static void prepare(const struct attention *a, struct state *s, int64_t b, int64_t first, int64_t count) {
  const int64_t floats = row_floats(a);
  memset(s->q, 0, (size_t)(count * floats) * sizeof(float));
  memset(s->numerator, 0, (size_t)(count * floats) * sizeof(float));
  for (int64_t r = 0; r < count; ++r) {
    const int64_t head = (first + r) / a->queries, query = (first + r) % a->queries;
    const char *from = a->q + b * a->q_batch_stride + query * a->q_query_stride + head * a->q_head_stride;
    float *to = s->q + r * floats;
    for (int64_t i = 0; i < a->head_dim; ++i)
      to[lane_of(a->kv_type, i)] = element(a->q_type, from, i) * a->scale;
    s->maximum[r] = -INFINITY;
    s->denominator[r] = 0.0f;
  }
}

static void write_records(const struct attention *a, const struct state *s, float *records, int64_t count) {
  const int64_t width = a->head_dim + RECORD_NUMERATOR;
  for (int64_t r = 0; r < count; ++r, records += width) {
    const float *numerator = s->numerator + r * row_floats(a);
    const int invalid = s->denominator[r] != s->denominator[r]; /* a NaN score: all of the row is NaN */
    set_identity(records, width);
    if (!invalid && s->maximum[r] == -INFINITY) continue;
    records[RECORD_MAX] = invalid ? (float)NAN : s->maximum[r];
    records[RECORD_DENOMINATOR] = canonical(s->denominator[r]);
    for (int64_t i = 0; i < a->head_dim; ++i)
      records[RECORD_NUMERATOR + i] = invalid ? (float)NAN : canonical(numerator[lane_of(a->kv_type, i)]);
  }
}

/* All rows of one KV head over one block. `head` counts from the first of the piece of work. */
static void attend_block(const struct attention *a, const struct state *s, struct block *b, int64_t head) {
  const int64_t rows = rows_per_kv_head(a), floats = row_floats(a);
  for (int64_t r = 0; r < rows; r += MAX_ROWS) {
    const int64_t row = head * rows + r, together = rows - r < MAX_ROWS ? rows - r : MAX_ROWS;
    b->q = s->q + row * floats;
    b->numerator = s->numerator + row * floats;
    b->maximum = s->maximum + row;
    b->denominator = s->denominator + row;
    attend[a->kv_type][together - 1](b);
  }
}

/* Tokens begin..end of batch row `batch`, KV heads first..first + heads, in the order in which they lie in memory:
 * head by head where a head's tokens are neighbours, else block by block through all the heads. */
static void attend_tokens(const struct attention *a, const struct state *s, int64_t batch, int64_t begin, int64_t end,
                          int64_t first, int64_t heads) {
  const int64_t blocks = (end - begin + BLOCK - 1) / BLOCK, steps = blocks * heads;
  const int by_head = llabs(a->k_head_stride) > llabs(a->k_token_stride);
  struct block b = {.k_stride = a->k_token_stride, .v_stride = a->v_token_stride, .head_dim = (int)a->head_dim,
                    .row_floats = (int)row_floats(a)};
  const char *k = a->k + batch * a->k_batch_stride, *v = a->v + batch * a->v_batch_stride;
  for (int64_t step = 0; step < steps; ++step) {
    const int64_t head = by_head ? step / blocks : step % heads, block = by_head ? step % blocks : step / heads;
    const int64_t token = begin + block * BLOCK, left = end - token;
    b.k = k + token * a->k_token_stride + (first + head) * a->k_head_stride;
    b.v = v + token * a->v_token_stride + (first + head) * a->v_head_stride;
    b.tokens = (int)(left < BLOCK ? left : BLOCK);
    b.next_k = b.k;
    b.next_v = b.v;
    attend_block(a, s, &b, head);
  }
}

/* One chunk of tokens of one batch row: its records. */
static void attend_chunk(const struct attention *a, struct state *s, float *records, int64_t batch, int64_t chunk) {
  const int64_t length = a->lengths ? a->lengths[batch] : a->tokens, rows = a->heads * a->queries;
  const int64_t begin = chunk * CHUNK, end = length < begin + CHUNK ? length : begin + CHUNK;
  prepare(a, s, batch, 0, rows);
  if (begin < end) attend_tokens(a, s, batch, begin, end, 0, a->kv_heads);
  write_records(a, s, records + batch * rows * (a->head_dim + RECORD_NUMERATOR), rows);
}

static int64_t wrong_length(const struct attention *a) {
  for (int64_t b = 0; a->lengths && b < a->batch; ++b)
    if (a->lengths[b] < 0 || a->lengths[b] > a->tokens) return b + 1;
  return 0;
}

int64_t partial_attention(const struct attention *a) {
  const int64_t wrong = wrong_length(a);
  if (wrong) return wrong;
  const int64_t width = a->head_dim + RECORD_NUMERATOR, rows = a->heads * a->queries;
  float *memory = a->workspace, *partials = memory + state_floats(a);
  struct state s = {.q = memory, .numerator = memory + rows * row_floats(a)};
  s.maximum = s.numerator + rows * row_floats(a);
  s.denominator = s.maximum + rows;
  for (int64_t chunk = 0; chunk < chunk_count(a->tokens); ++chunk) {
    float *records = chunk ? partials + (chunk - 1) * record_count(a) * width : a->records;
    for (int64_t b = 0; b < a->batch; ++b) attend_chunk(a, &s, records, b, chunk);
    if (chunk) merge_partials(a->records, records, record_count(a), width);
  }
  return 0;
}
