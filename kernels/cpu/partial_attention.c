/* Attention of a few queries over many cached tokens, in one pass over the cache, as records.
 *
 * The tokens of a batch row that any query sees are cut into chunks of at most CHUNK. A chunk of some KV heads is a
 * piece of work for one thread; the partials of chunks are merged in pairs afterwards, and so on: short sums are
 * accurate. How work is cut into chunks and blocks depends on what is visible alone, so the result depends neither on
 * threads nor on timing. */
#include "partial_attention.h"

#include "attend_span.h"
#include "bins_attention.h"
#include "shared_prefix.h"
#include "thread_pool.h"
#include "tiled_attention.h"

/* One call, cut into pieces of work: batch x chunks x parts of the KV heads. */
struct plan {
  const struct attention *a;
  int64_t chunks, parts;
};

/* What is read of a batch row. */
struct reading {
  int64_t count, tokens;
  struct stretch *stretches;
};

/* The workspace: states of the threads, readings of the batch rows, partials of the chunks but the first. */
static int64_t reading_bytes(const struct attention *a) {
  const int64_t stretches = most_stretches(a->queries) * (int64_t)sizeof(struct stretch);
  return (int64_t)sizeof(struct reading) + stretches + 4 * a->queries * (int64_t)sizeof(int64_t);
}

static char *readings_of(const struct attention *a) { return (char *)a->workspace + threads_of(a) * state_bytes(a); }

static struct reading *reading_of(const struct attention *a, int64_t b) {
  return (struct reading *)(readings_of(a) + b * reading_bytes(a));
}

/* The records of the first chunk are the result. */
static float *records_of(const struct attention *a, int64_t chunk) {
  if (chunk == 0) return a->records;
  float *partials = (float *)(readings_of(a) + a->batch * reading_bytes(a));
  return partials + (chunk - 1) * record_count(a) * record_width(a);
}

int64_t plain_workspace(const struct attention *a) {
  if (suits_tiles(a)) return tiled_workspace(a);
  const int64_t partials = quotient_up(a->tokens, CHUNK) * record_count(a) * record_width(a) * (int64_t)sizeof(float);
  return threads_of(a) * state_bytes(a) + a->batch * reading_bytes(a) + partials;
}

int64_t attention_workspace(const struct attention *a) {
  if (a->reproducible) return bins_workspace(a);
  return may_share(a) ? sharing_workspace(a) : plain_workspace(a);
}

/* One piece of work: the records of one chunk of one batch row, for a part of the KV heads. */
static void attend_piece(void *context, int64_t number, int worker) {
  const struct plan *p = context;
  const struct attention *a = p->a;
  const int64_t part = number % p->parts, chunk = number / p->parts % p->chunks, b = number / p->parts / p->chunks;
  const struct reading *reading = reading_of(a, b);
  const int64_t chunks = quotient_up(reading->tokens, CHUNK);
  struct piece piece = {.b = b, .head = part * a->kv_heads / p->parts, .stretches = reading->stretches};
  piece.heads = (part + 1) * a->kv_heads / p->parts - piece.head;
  if (chunk < chunks) {
    piece.count = reading->count;
    piece.begin = chunk * reading->tokens / chunks;
    piece.end = (chunk + 1) * reading->tokens / chunks;
  }
  const struct state state = state_of(a, worker);
  attend_tokens(a, &state, &piece);
  write_records(a, &state, &piece, records_of(a, chunk) + b * a->heads * a->queries * record_width(a));
}

/* What is read of each batch row. Returns the number of tokens of the one that has most. */
static int64_t find_readings(const struct attention *a) {
  int64_t longest = 0;
  for (int64_t b = 0; b < a->batch; ++b) {
    struct reading *r = reading_of(a, b);
    r->stretches = (struct stretch *)(r + 1);
    if (a->visible) {
      r->count = find_stretches(a->visible, b, a->queries, (int64_t *)(r->stretches + most_stretches(a->queries)),
                                r->stretches);
    } else {
      r->stretches[0] = (struct stretch){.end = a->lengths ? a->lengths[b] : a->tokens, .uniform = 1};
      r->count = 1;
    }
    const struct stretch *last = r->stretches + r->count - 1;
    r->tokens = r->count ? last->before + last->end - last->begin : 0;
    if (r->tokens > longest) longest = r->tokens;
  }
  return longest;
}

static int64_t find_wrong(const struct attention *a) {
  if (a->visible) return find_outside(a->visible, a->batch, a->queries, a->tokens);
  for (int64_t b = 0; b < a->batch && a->lengths; ++b)
    if (a->lengths[b] < 0 || a->lengths[b] > a->tokens) return b + 1;
  return 0;
}

void attend_plainly(const struct attention *a) {
  if (suits_tiles(a)) {
    tiled_attention(a);
    return;
  }
  const int64_t longest = find_readings(a);
  struct plan p = {.a = a, .chunks = longest > CHUNK ? quotient_up(longest, CHUNK) : 1, .parts = 1};
  const int64_t pieces = a->batch * p.chunks, wanted = 2 * threads_of(a);
  if (threads_of(a) > 1 && pieces < wanted) p.parts = least(a->kv_heads, quotient_up(wanted, pieces));
  run_items(threads_of(a), pieces * p.parts, attend_piece, &p);
  for (int64_t apart = 1; apart < p.chunks; apart *= 2)
    for (int64_t chunk = 0; chunk + apart < p.chunks; chunk += 2 * apart)
      merge_partials(records_of(a, chunk), records_of(a, chunk + apart), record_count(a), record_width(a));
}

int64_t partial_attention(const struct attention *a) {
  const int64_t wrong = find_wrong(a);
  if (wrong) return wrong;
  if (a->reproducible)
    attend_bins(a);
  else if (!may_share(a) || !attend_shared(a))
    attend_plainly(a);
  return 0;
}
