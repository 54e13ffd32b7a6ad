/* Attention of many rows per KV head (many queries, or many heads over one latent head): arithmetic binds, so keys and
 * values are read, widened and packed once for all rows of a piece of work, and pass through registers in tiles.
 *
 * A piece is a few panels of rows of one KV head. Tokens are cut at multiples of CHUNK and BLOCK whatever is seen of
 * them, and records of chunks are merged in ascending order: a row's bits depend on what it sees alone, neither on the
 * rows beside it nor on threads. Blocks that no row of a piece sees are not read, and panels that see nothing of a
 * block do not look at it. */
#include "tiled_attention.h"

#include "thread_pool.h"
#include "tile_rows.h"

/* Where there are fewer pieces than keep threads busy, their chunks are work of their own. */
static int cut_by_chunk(const struct attention *a) {
  return threads_of(a) > 1 && pieces_per_kv_head(a) == 1 && a->batch * a->kv_heads < 2 * threads_of(a);
}

int suits_tiles(const struct attention *a) {
  enum { FEWEST_ROWS = 32 }; /* where the two are equally fast, with AVX-512, AVX2 and without */
  return rows_per_kv_head(a) >= FEWEST_ROWS || a->v_dim != a->head_dim;
}

int64_t tiled_workspace(const struct attention *a) {
  const int64_t records = cut_by_chunk(a) ? quotient_up(a->tokens, CHUNK) * record_count(a) : 0;
  return threads_of(a) * state_bytes(a) + records * record_width(a) * (int64_t)sizeof(float);
}

/* The records of the first chunk are the result; those of the others lie behind the threads' states. */
static float *records_of(const struct attention *a, int64_t chunk) {
  float *others = (float *)((char *)a->workspace + threads_of(a) * state_bytes(a));
  return chunk ? others + (chunk - 1) * record_count(a) * record_width(a) : a->records;
}

/* Rows of the tokens in `bits`, which lie at `rows` from `from` on, to float32, as struct tokens has them. */
INLINE void pack(enum element_type type, const char *from, const int64_t *rows, uint64_t bits, int64_t elements,
                 float *to) {
  for (int t = 0; t < BLOCK; ++t, to += SEGMENT)
    for (int64_t d = 0; d < elements; d += UNIT) {
      unit u = {splat(0.0f), splat(0.0f)};
      const char *at = from + rows[t] + d * (int64_t)element_size(type);
      if (bits >> t & 1) u = elements - d < UNIT ? load_part(type, at, (int)(elements - d)) : load_unit(type, at);
      float *into = to + d / SEGMENT * PACKED + d % SEGMENT;
      store(into, u.first);
      store(into + WIDTH, u.second);
    }
}

static void pack_block(enum element_type type, const char *from, const int64_t *rows, uint64_t bits, int64_t elements,
                       float *to) {
  if (type == FLOAT32) pack(FLOAT32, from, rows, bits, elements, to);
  if (type == FLOAT16) pack(FLOAT16, from, rows, bits, elements, to);
  if (type == BFLOAT16) pack(BFLOAT16, from, rows, bits, elements, to);
  if (type == E4M3FN) pack(E4M3FN, from, rows, bits, elements, to);
  if (type == E5M2) pack(E5M2, from, rows, bits, elements, to);
}

/* Where the keys, or the values, of a KV head begin. */
static const char *head_of_keys(const struct piece *p) { return p->a->k + p->kv_head * p->a->k_head_stride; }
static const char *head_of_values(const struct piece *p) { return p->a->v + p->kv_head * p->a->v_head_stride; }

/* The rows of a block; nobody reads beyond the last token. */
static void find_block(const struct piece *p, int64_t token, int keys, int64_t *rows) {
  find_rows(p->a, p->b, token, least(token + BLOCK, p->a->tokens), keys, rows);
}

/* Whether the values are the first channels of the keys: then these are read once for both. */
static int shares_keys(const struct attention *a) {
  return a->v == a->k && a->v_dim <= a->head_dim && a->v_batch_stride == a->k_batch_stride &&
         a->v_token_stride == a->k_token_stride && a->v_head_stride == a->k_head_stride;
}

/* The keys or values from `token` on, all of them by the end of a block that all panels see. */
static void find_coming(const struct piece *p, int64_t token, int keys, struct coming *c) {
  const int64_t elements = keys ? p->a->head_dim : p->a->v_dim;
  const int64_t lines = quotient_up(elements * (int64_t)element_size(p->a->kv_type), 64);
  const int64_t segments = quotient_up(p->a->head_dim, SEGMENT) + quotient_up(p->a->v_dim, SEGMENT);
  const int64_t steps = quotient_up(p->rows, PANEL) * segments * (BLOCK / 12);
  c->first = keys ? head_of_keys(p) : head_of_values(p);
  c->lines = (int)lines, c->step = (int)quotient_up(BLOCK * lines, steps);
  find_block(p, token, keys, c->rows);
}

/* Packs the tokens in `any`; tells what to prefetch. */
static struct tokens take_tokens(const struct piece *p, int64_t token, uint64_t any) {
  const struct attention *a = p->a;
  int64_t rows[BLOCK] = {0};
  const int64_t next = next_block(p, token + BLOCK, a->tokens);
  const int apart = !shares_keys(a), whole = next + BLOCK <= a->tokens;
  struct tokens block = {.keys = p->s.keys, .values = apart ? p->s.values : p->s.keys};
  block.key_floats = (int)whole_units(a->head_dim), block.value_floats = (int)whole_units(a->v_dim);
  find_block(p, token, 1, rows);
  pack_block(a->kv_type, head_of_keys(p), rows, any, a->head_dim, p->s.keys);
  if (apart) {
    find_block(p, token, 0, rows);
    pack_block(a->kv_type, head_of_values(p), rows, any, a->v_dim, p->s.values);
  }
  if (whole) find_coming(p, next, 1, &block.next_keys);
  if (whole && apart) find_coming(p, next, 0, &block.next_values);
  return block;
}

static void attend_tokens(const struct piece *p, int64_t token) {
  const struct state *s = &p->s;
  const struct visible *v = p->a->visible;
  const uint64_t any = look(p, token);
  if (!any) return;
  struct tokens block = take_tokens(p, token, any);
  float offset[BLOCK];
  if (v) block.softcap = v->softcap;
  if (v && v->slopes) measure(p, token, any, offset), block.offset = offset;
  for (int64_t r = 0; r < p->rows; r += PANEL) {
    const struct panel panel = {.rows = (int)least(p->rows - r, PANEL),
                                .q = s->q + r * block.key_floats,
                                .numerator = s->numerator + r * block.value_floats,
                                .maximum = s->maximum + r,
                                .denominator = s->denominator + r,
                                .slope = s->slope + r,
                                .distance = s->distance + r,
                                .seen = s->seen + r};
    attend_panel(&panel, &block, s->scores);
  }
}

/* One chunk into the piece's records: as they are, or merged with what is there. */
static void attend_chunk(const struct piece *p, int64_t chunk, int merge, float *records) {
  const int64_t end = (chunk + 1) * CHUNK, width = record_width(p->a), floats = whole_units(p->a->v_dim);
  const struct state *s = &p->s;
  const float v_scale = scale_of(p->a, p->a->v_scale, p->kv_head);
  empty(p);
  for (int64_t token = next_block(p, chunk * CHUNK, end); token < end; token = next_block(p, token + BLOCK, end))
    attend_tokens(p, token);
  for (int64_t r = 0; r < p->rows; ++r, records += width) {
    write_row(p->a, s->maximum[r] + 0.0f, s->denominator[r], 1.0f, v_scale, s->numerator + r * floats,
              merge ? s->row : records);
    if (merge) merge_partials(records, s->row, 1, width);
  }
}

/* Records as if distances had been counted from the query. Digits of a maximum that float32 cannot hold are not lost:
 * the sums take them as a factor. */
static void move_to_query(const struct piece *p, float *records) {
  enum { LARGEST_EXPONENT = 64 };
  const struct visible *v = p->a->visible;
  const int64_t width = record_width(p->a);
  for (int64_t r = 0; r < p->rows && v && v->slopes; ++r, records += width) {
    const double position = (double)v->q_positions[p->b * p->a->queries + query_of(p, r)];
    const double whole = records[RECORD_MAX] - v->slopes[head_of(p, r)] * (position - base_of(p, r));
    const double rest = whole - (float)whole;
    records[RECORD_MAX] = (float)whole;
    if (!(rest > -LARGEST_EXPONENT && rest < LARGEST_EXPONENT)) continue;
    for (int64_t i = 1; i < width; ++i) records[i] = canonical((float)exp(rest) * records[i]);
  }
}

/* Piece `index` of the call. */
static struct piece piece_at(const struct attention *a, int64_t index) {
  const int64_t pieces = pieces_per_kv_head(a), rows = rows_per_kv_head(a);
  struct piece p = {.a = a, .b = index / pieces / a->kv_heads, .kv_head = index / pieces % a->kv_heads};
  p.first = index % pieces * piece_rows(a);
  p.rows = least(rows - p.first, piece_rows(a));
  find_ranges(&p);
  return p;
}

static int64_t first_record(const struct piece *p) {
  return (p->b * p->a->kv_heads + p->kv_head) * rows_per_kv_head(p->a) + p->first;
}

static void take_state(struct piece *p, int worker) {
  uintptr_t at = (uintptr_t)p->a->workspace + (uintptr_t)(worker * state_bytes(p->a));
  p->s = state_at(p->a, &at);
  prepare(p);
}

/* All chunks of one piece. */
static void attend_piece(void *context, int64_t item, int worker) {
  const struct attention *a = context;
  struct piece p = piece_at(a, item);
  take_state(&p, worker);
  float *records = a->records + first_record(&p) * record_width(a);
  int64_t token = next_block(&p, 0, a->tokens);
  attend_chunk(&p, token / CHUNK, 0, records);
  while ((token = next_block(&p, (token / CHUNK + 1) * CHUNK, a->tokens)) < a->tokens)
    attend_chunk(&p, token / CHUNK, 1, records);
  move_to_query(&p, records);
}

/* Chunks of pieces as work of their own; merge_chunks() follows. */
static int64_t chunks_of(const struct attention *a) { return most(1, quotient_up(a->tokens, CHUNK)); }

static int is_seen(const struct piece *p, int64_t chunk) {
  const int64_t end = (chunk + 1) * CHUNK;
  return next_block(p, chunk * CHUNK, end) < end;
}

static void attend_one_chunk(void *context, int64_t item, int worker) {
  const struct attention *a = context;
  const int64_t chunk = item % chunks_of(a);
  struct piece p = piece_at(a, item / chunks_of(a));
  if (chunk && !is_seen(&p, chunk)) return;
  take_state(&p, worker);
  attend_chunk(&p, chunk, 0, records_of(a, chunk) + first_record(&p) * record_width(a));
}

static void merge_chunks(const struct attention *a, int64_t item) {
  const struct piece p = piece_at(a, item);
  const int64_t width = record_width(a), at = first_record(&p) * width;
  for (int64_t chunk = 1; chunk < chunks_of(a); ++chunk)
    if (is_seen(&p, chunk)) merge_partials(a->records + at, records_of(a, chunk) + at, p.rows, width);
  move_to_query(&p, a->records + at);
}

void tiled_attention(const struct attention *a) {
  const int64_t pieces = a->batch * a->kv_heads * pieces_per_kv_head(a);
  if (cut_by_chunk(a)) {
    run_items(threads_of(a), pieces * chunks_of(a), attend_one_chunk, (void *)a);
    for (int64_t i = 0; i < pieces; ++i) merge_chunks(a, i);
  } else {
    run_items(threads_of(a), pieces, attend_piece, (void *)a);
  }
}
