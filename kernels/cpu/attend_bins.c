/* Attention of a few queries over many cached tokens as records of bins.h, whose bits depend on nothing but what each
 * query sees: blocks, threads and the order of tokens in memory are as is convenient. */
#include <stdlib.h>

#include "attend_whole_blocks.h"

#include "bins_attention.h"
#include "thread_pool.h"
#include "token_rows.h"

/* A thread takes any blocks of any KV heads, and sums up records of its own; all are merged at the end. */
struct job {
  const struct attention *a;
  int64_t blocks; /* of the sequence that has most, with those of drafts */
  int64_t chunks, parts;
};

static int64_t group_of(const struct attention *a) { return a->heads / a->kv_heads; }
static int64_t row_floats(const struct attention *a) { return quotient_up(a->head_dim, LANES) * LANES; }

/* The workspace: q, widened; what each thread holds of a block's visible bits; records of the threads but the first. */
static int64_t query_bytes(const struct attention *a) {
  return record_count(a) * row_floats(a) * (int64_t)sizeof(float);
}
static uint32_t *bits_of_thread(const struct attention *a, int worker) {
  return (uint32_t *)((char *)a->workspace + query_bytes(a)) + worker * 2 * quotient_up(a->queries, 2);
}
static int64_t *records_of_thread(const struct attention *a, int worker) {
  if (worker == 0) return (int64_t *)a->records;
  int64_t *rest = (int64_t *)bits_of_thread(a, (int)threads_of(a));
  return rest + (worker - 1) * record_count(a) * bins_width(a->v_dim);
}

int64_t bins_workspace(const struct attention *a) {
  const int64_t bits = threads_of(a) * 2 * quotient_up(a->queries, 2) * (int64_t)sizeof(uint32_t);
  const int64_t records = record_count(a) * bins_width(a->v_dim) * (int64_t)sizeof(int64_t);
  return query_bytes(a) + bits + (threads_of(a) - 1) * records;
}

/* [batch][kv_heads][queries][group][row_floats] */
static float *row_of(const struct attention *a, int64_t b, int64_t kv_head, int64_t row) {
  return (float *)a->workspace + ((b * a->kv_heads + kv_head) * group_of(a) * a->queries + row) * row_floats(a);
}

static void widen_row(const struct attention *a, const char *from, float scale, float *to) {
  const int64_t size = (int64_t)element_size((enum element_type)a->q_type);
  for (int64_t d = 0; d < row_floats(a); d += WIDTH) {
    const int64_t left = a->head_dim - d;
    const vector x = left > 0 ? load_first((enum element_type)a->q_type, from + d * size, left) : splat(0.0f);
    store(to + d, x * splat(scale));
  }
}

static void widen_queries(const struct attention *a) {
  for (int64_t b = 0; b < a->batch; ++b)
    for (int64_t h = 0; h < a->heads; ++h)
      for (int64_t i = 0; i < a->queries; ++i) {
        const char *from = a->q + b * a->q_batch_stride + i * a->q_query_stride + h * a->q_head_stride;
        const int64_t kv_head = h / group_of(a), row = i * group_of(a) + h % group_of(a);
        widen_row(a, from, a->scale * (a->k_scale ? a->k_scale[kv_head] : 1.0f), row_of(a, b, kv_head, row));
      }
}

/* Blocks of tokens that are no drafts, which come first. */
static int64_t context_of(const struct attention *a, int64_t b) {
  if (a->visible && a->visible->drafts) return a->visible->draft_begins[b];
  return a->visible || !a->lengths ? a->tokens : a->lengths[b];
}

/* Tokens of a block: of the context, and then of the drafts. */
static int64_t tokens_of_block(const struct attention *a, int64_t b, int64_t number, int64_t *begin) {
  const int64_t context = context_of(a, b), blocks = quotient_up(context, BINS_BLOCK);
  const int64_t drafts = a->visible ? a->visible->drafts : 0;
  *begin = number < blocks ? number * BINS_BLOCK : context + (number - blocks) * BINS_BLOCK;
  return least((number < blocks ? context : context + drafts) - *begin, BINS_BLOCK);
}

/* Which of its tokens each query sees; what any of them does. */
static uint32_t find_bits(const struct attention *a, int64_t b, int64_t begin, int64_t tokens, uint32_t *bits) {
  enum { HALF = BINS_BLOCK / 2 };
  uint32_t seen = 0;
  for (int64_t i = 0; i < a->queries; ++i) {
    if (a->visible) {
      bits[i] = visible_bits(a->visible, b, a->queries, i, begin, least(tokens, HALF));
      if (tokens > HALF) bits[i] |= visible_bits(a->visible, b, a->queries, i, begin + HALF, tokens - HALF) << HALF;
    } else {
      bits[i] = tokens == BINS_BLOCK ? 0xffffffffu : (1u << tokens) - 1;
    }
    seen |= bits[i];
  }
  return seen;
}

/* Where the tokens' rows are; what nobody sees is not looked at, its page neither. */
static void point_at_tokens(const struct attention *a, int64_t b, int64_t begin, uint32_t seen, struct bins_block *to) {
  const int first = __builtin_ctz(seen);
  if (!a->block_table) {
    find_rows(a, b, begin, begin + to->tokens, 1, to->k_rows);
    find_rows(a, b, begin, begin + to->tokens, 0, to->v_rows);
  } else {
    for (int t = 0; t < to->tokens; ++t)
      if (seen >> t & 1) {
        find_rows(a, b, begin + t, begin + t + 1, 1, to->k_rows + t);
        find_rows(a, b, begin + t, begin + t + 1, 0, to->v_rows + t);
      }
  }
  for (int t = 0; t < BINS_BLOCK; ++t)
    if (!(seen >> t & 1)) to->k_rows[t] = to->k_rows[first], to->v_rows[t] = to->v_rows[first];
}

/* What is prefetched: where heads of neighbouring tokens fill memory, the next block in the order of memory, dealt out
 * to the heads; else the same head's. */
static int64_t coming(const struct attention *a, const struct bins_block *b, int64_t kv_head, int keys,
                      int64_t *share) {
  const int64_t token = keys ? a->k_token_stride : a->v_token_stride, head = keys ? a->k_head_stride : a->v_head_stride;
  const int64_t *rows = keys ? b->k_rows : b->v_rows;
  const int in_memory = !a->block_table && token == a->kv_heads * head;
  *share = in_memory ? head : token;
  return rows[0] + BINS_BLOCK * token + (in_memory ? kv_head * (BINS_BLOCK - 1) * head : 0);
}

/* Rows of a KV head, in groups that see the same of a block. */
static void attend_head(const struct attention *a, int64_t b, int64_t kv_head, const struct bins_block *block,
                        const uint32_t *bits, int64_t *records) {
  const int64_t group = group_of(a), rows = group * a->queries, width = bins_width(a->v_dim);
  uint32_t known = 0;
  int32_t value = 0;
  for (int64_t row = 0; row < rows;) {
    struct bins_rows g = {.bits = bits[row / group], .q = row_of(a, b, kv_head, row)};
    for (; row < rows && g.rows < ROWS_TOGETHER && bits[row / group] == g.bits; ++row, ++g.rows) {
      const int64_t head = kv_head * group + row % group, query = row / group;
      g.records[g.rows] = records + ((b * a->heads + head) * a->queries + query) * width;
      if (block->alibi) {
        g.slope[g.rows] = a->visible->slopes[head];
        g.time[g.rows] = (double)a->visible->q_positions[b * a->queries + query];
      }
    }
    if (!g.bits) continue;
    if (a->reproducible == OF_BLOCKS) {
      attend_whole(a->kv_type, block, &g);
      continue;
    }
    if (g.bits != known) value = value_exponents[a->kv_type](block, known = g.bits);
    attend_exactly(a->kv_type, block, &g, value);
  }
}

static void attend_block(const struct job *j, int64_t b, int64_t number, int64_t head, int64_t end, int worker) {
  const struct attention *a = j->a;
  struct bins_block block = {.head_dim = a->head_dim, .v_dim = a->v_dim, .row_floats = row_floats(a)};
  uint32_t *bits = bits_of_thread(a, worker);
  int64_t begin;
  block.tokens = (int)tokens_of_block(a, b, number, &begin);
  if (block.tokens <= 0 || !(block.seen = find_bits(a, b, begin, block.tokens, bits))) return;
  block.tokens = 32 - __builtin_clz(block.seen);
  point_at_tokens(a, b, begin, block.seen, &block);
  if (a->visible) {
    block.softcap = a->visible->softcap, block.alibi = a->visible->slopes != NULL;
    if (block.alibi) find_positions(a->visible, b, begin, begin + block.tokens, block.position);
  }
  for (int64_t h = head; h < end; ++h) {
    block.k = a->k + h * a->k_head_stride, block.v = a->v + h * a->v_head_stride;
    block.next_k = coming(a, &block, h, 1, &block.k_share);
    block.next_v = coming(a, &block, h, 0, &block.v_share);
    block.v_scale = a->v_scale ? a->v_scale[h] : 1.0;
    attend_head(a, b, h, &block, bits, records_of_thread(a, worker));
  }
}

/* Blocks first..last of all heads of a part: head by head where a head's tokens are neighbours in memory. */
static void attend_piece(void *context, int64_t number, int worker) {
  const struct job *j = context;
  const struct attention *a = j->a;
  const int64_t part = number % j->parts, chunk = number / j->parts % j->chunks, b = number / j->parts / j->chunks;
  const int64_t head = part * a->kv_heads / j->parts, end = (part + 1) * a->kv_heads / j->parts;
  const int64_t first = chunk * j->blocks / j->chunks, last = (chunk + 1) * j->blocks / j->chunks;
  const int64_t near = llabs(a->k_head_stride) > llabs(a->k_token_stride) ? 1 : end - head;
  for (int64_t h = head; h < end; h += near)
    for (int64_t i = first; i < last; ++i) attend_block(j, b, i, h, h + near, worker);
}

static void set_all_empty(int64_t *records, const struct attention *a) {
  for (int64_t i = 0; i < record_count(a); ++i) set_no_tokens(records + i * bins_width(a->v_dim), a->v_dim);
}

void attend_bins(const struct attention *a) {
  struct job j = {.a = a, .chunks = 1, .parts = 1};
  for (int64_t b = 0; b < a->batch; ++b) {
    const int64_t drafts = a->visible ? a->visible->drafts : 0;
    const int64_t blocks = quotient_up(context_of(a, b), BINS_BLOCK) + quotient_up(drafts, BINS_BLOCK);
    if (blocks > j.blocks) j.blocks = blocks;
  }
  const int64_t threads = threads_of(a);
  if (threads > 1) {
    j.chunks = least(quotient_up(j.blocks, 2), 2 * threads);
    if (j.chunks < 2 * threads) j.parts = least(a->kv_heads, threads);
    if (j.chunks < 1) j.chunks = 1;
  }
  for (int worker = 0; worker < threads; ++worker) set_all_empty(records_of_thread(a, worker), a);
  widen_queries(a);
  run_items((int)threads, a->batch * j.chunks * j.parts, attend_piece, &j);
  for (int worker = 1; worker < threads; ++worker)
    merge_bins((int64_t *)a->records, records_of_thread(a, worker), record_count(a), bins_width(a->v_dim));
}
