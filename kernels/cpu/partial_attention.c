/* Attention of a few queries over many cached tokens, in one pass over the cache, as records.
 *
 * The tokens of a batch row are cut into chunks of at most CHUNK. A chunk of some KV heads is a piece of work for one
 * thread; the partials of chunks are merged in ascending order afterwards. How work is cut into chunks and blocks
 * depends on the number of tokens alone, so the result depends neither on threads nor on timing. */
#include "partial_attention.h"

#include <stdlib.h>

#include "attend_block.h"
#include "records.h"
#include "thread_pool.h"

enum { CHUNK = 1008 };

/* What a thread sums up: all rows of a range of KV heads. */
struct state {
  float *q, *numerator; /* [rows][row_floats], in unit order */
  float *denominator;   /* [rows][WIDTH]: sums by lane */
  float *maximum;       /* [rows] */
};

/* One call, cut into pieces of work: batch x chunks x parts of the KV heads. */
struct plan {
  const struct attention *a;
  int64_t chunks, parts;
};

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t quotient_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

static int64_t row_floats(const struct attention *a) { return quotient_up(a->head_dim, UNIT) * UNIT; }
static int64_t rows_per_kv_head(const struct attention *a) { return a->heads / a->kv_heads * a->queries; }
static int64_t record_width(const struct attention *a) { return a->head_dim + RECORD_NUMERATOR; }
static int64_t record_count(const struct attention *a) { return a->batch * a->heads * a->queries; }
static int64_t length_of(const struct attention *a, int64_t b) { return a->lengths ? a->lengths[b] : a->tokens; }
static int threads_of(const struct attention *a) { return (int)least(a->threads > 1 ? a->threads : 1, MAX_THREADS); }

static int64_t state_floats(const struct attention *a) {
  const int64_t rows = a->heads * a->queries;
  return quotient_up(rows * (2 * row_floats(a) + WIDTH + 1), 16) * 16;
}

int64_t attention_workspace(const struct attention *a) {
  const int64_t partials = quotient_up(a->tokens, CHUNK) * record_count(a) * record_width(a);
  return (int64_t)sizeof(float) * (threads_of(a) * state_floats(a) + partials);
}

static struct state state_of(const struct attention *a, int worker) {
  const int64_t rows = a->heads * a->queries;
  struct state s = {.q = (float *)a->workspace + worker * state_floats(a)};
  s.numerator = s.q + rows * row_floats(a);
  s.denominator = s.numerator + rows * row_floats(a);
  s.maximum = s.denominator + rows * WIDTH;
  return s;
}

/* The records of the first chunk are the result; those of the others lie behind the threads' states. */
static float *records_of(const struct attention *a, int64_t chunk) {
  if (chunk == 0) return a->records;
  float *partials = (float *)a->workspace + threads_of(a) * state_floats(a);
  return partials + (chunk - 1) * record_count(a) * record_width(a);
}

/* One row of q to float32, scaled, in the unit order of the keys, padded with 0. */
static void widen_query(const struct attention *a, const char *from, float *to) {
  for (int64_t d = 0; d < a->head_dim; d += UNIT) {
    const int64_t left = a->head_dim - d;
    const char *at = from + d * (int64_t)element_size(a->q_type);
    unit u = left >= UNIT ? load_unit(a->q_type, at) : load_part(a->q_type, at, (int)left);
    if (is_split(a->q_type) && !is_split(a->kv_type)) u = interleave(u);
    if (!is_split(a->q_type) && is_split(a->kv_type)) u = split(u);
    store(to + d, u.first * splat(a->scale));
    store(to + d + WIDTH, u.second * splat(a->scale));
  }
}

/* Queries of the rows first..first + count of batch row `b`; sums emptied. */
static void prepare(const struct attention *a, const struct state *s, int64_t b, int64_t first, int64_t count) {
  const int64_t floats = row_floats(a);
  for (int64_t r = 0; r < count; ++r) {
    const int64_t head = (first + r) / a->queries, query = (first + r) % a->queries;
    const char *from = a->q + b * a->q_batch_stride + query * a->q_query_stride + head * a->q_head_stride;
    widen_query(a, from, s->q + r * floats);
    s->maximum[r] = -INFINITY;
  }
  memset(s->numerator, 0, (size_t)(count * floats) * sizeof(float));
  memset(s->denominator, 0, (size_t)(count * WIDTH) * sizeof(float));
}

static void write_numerator(const struct attention *a, float *numerator, float *to) {
  if (is_split(a->kv_type))
    for (int64_t d = 0; d < row_floats(a); d += UNIT) {
      const unit u = interleave((unit){load(numerator + d), load(numerator + d + WIDTH)});
      store(numerator + d, u.first);
      store(numerator + d + WIDTH, u.second);
    }
  for (int64_t i = 0; i < a->head_dim; ++i) to[i] = canonical(numerator[i]);
}

static void write_records(const struct attention *a, const struct state *s, float *record, int64_t count) {
  const int64_t width = record_width(a);
  for (int64_t r = 0; r < count; ++r, record += width) {
    const float denominator = sum_lanes(load(s->denominator + r * WIDTH));
    if (denominator != denominator) { /* a NaN score: all of the row is NaN */
      for (int64_t i = 0; i < width; ++i) record[i] = (float)NAN;
    } else if (s->maximum[r] == -INFINITY) {
      set_identity(record, width);
    } else {
      record[RECORD_MAX] = s->maximum[r];
      record[RECORD_DENOMINATOR] = denominator;
      write_numerator(a, s->numerator + r * row_floats(a), record + RECORD_NUMERATOR);
    }
  }
}

/* Some tokens of some KV heads of one batch row, as blocks in the order in which they are read. */
struct span {
  const char *k, *v; /* the first token of the first head */
  int64_t tokens, heads, blocks;
};

/* SCATTERED: block `i` holds every blocks-th token from the i-th on: BLOCK rows far apart, each followed by its
 * neighbour in the next block. The number of blocks is odd, lest the streams fall into one set of the cache.
 * NEIGHBOURS: block `i` holds the i-th BLOCK tokens. */
static int64_t block_count(const struct attention *a, int64_t tokens) {
  const int64_t blocks = quotient_up(tokens, BLOCK);
  return a->order == SCATTERED && blocks > 8 ? blocks | 1 : blocks;
}

/* The first token of a block. */
static int64_t token_at(const struct attention *a, int64_t block) {
  return a->order == SCATTERED ? block : block * BLOCK;
}

/* From each of its tokens to the next. */
static int64_t step_of(const struct attention *a, const struct span *s) {
  return a->order == SCATTERED ? s->blocks : 1;
}

/* Head by head where a head's tokens are neighbours in memory, else block by block through all the heads. */
static int64_t head_at(const struct attention *a, const struct span *s, int64_t step) {
  return llabs(a->k_head_stride) > llabs(a->k_token_stride) ? step / s->blocks : step % s->heads;
}

static int64_t block_at(const struct attention *a, const struct span *s, int64_t step) {
  return llabs(a->k_head_stride) > llabs(a->k_token_stride) ? step % s->blocks : step / s->heads;
}

static const char *key_at(const struct attention *a, const struct span *s, int64_t step) {
  return s->k + token_at(a, block_at(a, s, step)) * a->k_token_stride + head_at(a, s, step) * a->k_head_stride;
}

static const char *value_at(const struct attention *a, const struct span *s, int64_t step) {
  return s->v + token_at(a, block_at(a, s, step)) * a->v_token_stride + head_at(a, s, step) * a->v_head_stride;
}

/* What is prefetched at step `step`, for keys or values: the block of a later step, token by token. Where the heads of
 * neighbouring tokens fill memory without a gap, all heads of the block that comes are dealt out to the steps of this
 * one in the order of memory, as if each were BLOCK rows of a head without a gap. `share`: from a token to the next. */
static const char *coming(const struct attention *a, const struct span *s, int64_t step, int keys, int64_t *share) {
  const int64_t token = keys ? a->k_token_stride : a->v_token_stride, head = keys ? a->k_head_stride : a->v_head_stride;
  if (a->order == NEIGHBOURS && token == s->heads * head) {
    const int64_t block = least(block_at(a, s, step) + 1, s->blocks - 1);
    *share = head;
    return (keys ? s->k : s->v) + (block * s->heads + head_at(a, s, step)) * BLOCK * head;
  }
  enum { AHEAD = 2 };
  const int64_t later = least(step + AHEAD, s->blocks * s->heads - 1);
  *share = step_of(a, s) * token;
  return keys ? key_at(a, s, later) : value_at(a, s, later);
}

static void attend_span(const struct attention *a, const struct state *state, const struct span *s) {
  const int64_t steps = s->blocks * s->heads, rows = rows_per_kv_head(a), floats = row_floats(a);
  struct block b = {.k_stride = step_of(a, s) * a->k_token_stride,
                    .v_stride = step_of(a, s) * a->v_token_stride,
                    .head_dim = (int)a->head_dim,
                    .row_floats = (int)floats};
  for (int64_t step = 0; step < steps; ++step) {
    const int64_t left = s->tokens - token_at(a, block_at(a, s, step));
    b.k = key_at(a, s, step);
    b.v = value_at(a, s, step);
    b.next_k = coming(a, s, step, 1, &b.k_share) - b.k;
    b.next_v = coming(a, s, step, 0, &b.v_share) - b.v;
    b.tokens = (int)least(quotient_up(left, step_of(a, s)), BLOCK);
    for (int64_t r = 0; r < rows; r += MAX_ROWS) {
      const int64_t row = head_at(a, s, step) * rows + r;
      b.q = state->q + row * floats;
      b.numerator = state->numerator + row * floats;
      b.denominator = state->denominator + row * WIDTH;
      b.maximum = state->maximum + row;
      attend_rows[a->order][a->kv_type][least(rows - r, MAX_ROWS) - 1](&b);
    }
  }
}

/* One piece of work: the records of one chunk of one batch row, for a part of the KV heads. */
static void attend_piece(void *context, int64_t piece, int worker) {
  const struct plan *p = context;
  const struct attention *a = p->a;
  const int64_t part = piece % p->parts, chunk = piece / p->parts % p->chunks, b = piece / p->parts / p->chunks;
  const int64_t head = part * a->kv_heads / p->parts, heads = (part + 1) * a->kv_heads / p->parts - head;
  const int64_t length = length_of(a, b), chunks = quotient_up(length, CHUNK);
  const int64_t begin = chunk < chunks ? chunk * length / chunks : 0;
  const int64_t end = chunk < chunks ? (chunk + 1) * length / chunks : 0;
  const struct state state = state_of(a, worker);
  prepare(a, &state, b, head * rows_per_kv_head(a), heads * rows_per_kv_head(a));
  if (begin < end) {
    struct span s = {.tokens = end - begin, .heads = heads, .blocks = block_count(a, end - begin)};
    s.k = a->k + b * a->k_batch_stride + begin * a->k_token_stride + head * a->k_head_stride;
    s.v = a->v + b * a->v_batch_stride + begin * a->v_token_stride + head * a->v_head_stride;
    attend_span(a, &state, &s);
  }
  const int64_t first = b * a->heads * a->queries + head * rows_per_kv_head(a);
  write_records(a, &state, records_of(a, chunk) + first * record_width(a), heads * rows_per_kv_head(a));
}

int64_t partial_attention(const struct attention *a) {
  int64_t longest = 0;
  for (int64_t b = 0; b < a->batch; ++b) {
    const int64_t length = length_of(a, b);
    if (length < 0 || length > a->tokens) return b + 1;
    if (length > longest) longest = length;
  }
  struct plan p = {.a = a, .chunks = longest > CHUNK ? quotient_up(longest, CHUNK) : 1, .parts = 1};
  const int64_t pieces = a->batch * p.chunks, wanted = 2 * threads_of(a);
  if (threads_of(a) > 1 && pieces < wanted) p.parts = least(a->kv_heads, quotient_up(wanted, pieces));
  run_items(threads_of(a), pieces * p.parts, attend_piece, &p);
  for (int64_t chunk = 1; chunk < p.chunks; ++chunk)
    merge_partials(a->records, records_of(a, chunk), record_count(a), record_width(a));
  return 0;
}
