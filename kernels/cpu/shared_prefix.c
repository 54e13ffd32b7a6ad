/* Attention of sequences whose first pages are the same, as those of many questions about one text: these pages are
 * read once, for the queries of all of them together, as if they were queries of one sequence. What follows is each
 * sequence's own, and the records of both are merged.
 *
 * Nobody says so: equal page numbers do. */
#include "shared_prefix.h"

#include <string.h>

#include "records.h"
#include "simd.h"

/* Tokens from which a second pass costs less than it saves. */
enum { SHORTEST_PREFIX = 64 };

static int64_t whole_lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }
static int64_t q_bytes(const struct attention *a) { return a->head_dim * (int64_t)element_size(a->q_type); }

/* What the workspace holds before that of the attention itself. */
struct sharing {
  int64_t *lengths; /* [batch]: of what is each sequence's own */
  int64_t *members; /* [batch]: the sequences of one group after the other */
  int64_t *counts;  /* [batch]: how many a group has, where its first one stands */
  int32_t *table;   /* [batch, pages]: of what is their own */
  float *records;   /* of one group after the other: [heads, queries of the group, v_dim + 2] */
  char *q;          /* [queries of a group, heads, head_dim] */
  char *rest;       /* for the attention itself */
};

static struct sharing sharing_at(const struct attention *a, char *at) {
  struct sharing s = {.lengths = (int64_t *)at};
  s.members = (int64_t *)(at += whole_lines(8 * a->batch));
  s.counts = (int64_t *)(at += whole_lines(8 * a->batch));
  s.table = (int32_t *)(at += whole_lines(8 * a->batch));
  s.records = (float *)(at += whole_lines(4 * a->batch * a->pages));
  s.q = at += whole_lines(4 * a->batch * a->queries * a->heads * record_width(a));
  s.rest = at + whole_lines(a->batch * a->queries * a->heads * q_bytes(a));
  return s;
}

/* The queries of `count` sequences as those of one. */
static struct attention together(const struct attention *a, const struct sharing *s, int64_t count) {
  struct attention one = *a;
  one.batch = 1, one.queries = count * a->queries;
  one.q = s->q, one.workspace = s->rest;
  one.q_head_stride = q_bytes(a), one.q_query_stride = a->heads * one.q_head_stride;
  return one;
}

int64_t sharing_workspace(const struct attention *a) {
  const struct sharing s = sharing_at(a, NULL);
  int64_t most = plain_workspace(a);
  for (int64_t count = 2; count <= a->batch; ++count) {
    const struct attention one = together(a, &s, count);
    const int64_t bytes = plain_workspace(&one);
    most = bytes > most ? bytes : most;
  }
  return (int64_t)(uintptr_t)s.rest + most;
}

static int64_t length_of(const struct attention *a, int64_t b) { return a->lengths ? a->lengths[b] : a->tokens; }

/* How many tokens of whole pages two sequences share, at most `tokens`. */
static int64_t shared_tokens(const struct attention *a, int64_t b, int64_t other, int64_t tokens) {
  const int32_t *one = a->block_table + b * a->pages, *two = a->block_table + other * a->pages;
  const int64_t length = length_of(a, other), most = (length < tokens ? length : tokens) / a->page_size;
  int64_t same = 0;
  while (same < most && one[same] == two[same]) ++same;
  return same * a->page_size;
}

/* The sequences after `b` that share enough with it and are in no group yet, and `b` itself, into `members`. Returns
 * how many; *tokens becomes what all of them share. */
static int64_t find_group(const struct attention *a, const struct sharing *s, int64_t b, int64_t *members,
                          int64_t *tokens) {
  int64_t count = 1;
  members[0] = b;
  *tokens = length_of(a, b);
  for (int64_t other = b + 1; other < a->batch; ++other) {
    if (s->lengths[other] < length_of(a, other)) continue; /* it has a group */
    const int64_t shared = shared_tokens(a, b, other, *tokens);
    if (shared < SHORTEST_PREFIX || (count > 1 && 2 * shared < *tokens)) continue;
    members[count++] = other;
    *tokens = shared;
  }
  return count;
}

/* Leaves a group's sequences what is their own. */
static void take_away(const struct attention *a, const struct sharing *s, const int64_t *members, int64_t count,
                      int64_t tokens) {
  for (int64_t i = 0; i < count; ++i) {
    int32_t *own = s->table + members[i] * a->pages;
    memmove(own, own + tokens / a->page_size, (size_t)(a->pages - tokens / a->page_size) * sizeof *own);
    s->lengths[members[i]] -= tokens;
  }
}

/* Where the records of a group lie whose first sequence stands at `at` of all members. */
static float *records_at(const struct attention *a, const struct sharing *s, int64_t at) {
  return s->records + at * a->heads * a->queries * record_width(a);
}

static void attend_prefix(const struct attention *a, const struct sharing *s, int64_t at, int64_t tokens) {
  struct attention one = together(a, s, s->counts[at]);
  char *to = s->q;
  for (const int64_t *b = s->members + at; b < s->members + at + s->counts[at]; ++b)
    for (int64_t query = 0; query < a->queries; ++query)
      for (int64_t head = 0; head < a->heads; ++head, to += one.q_head_stride)
        memcpy(to, a->q + *b * a->q_batch_stride + query * a->q_query_stride + head * a->q_head_stride,
               (size_t)one.q_head_stride);
  one.records = records_at(a, s, at), one.lengths = &tokens;
  one.block_table = a->block_table + s->members[at] * a->pages;
  attend_plainly(&one);
}

static void merge_prefix(const struct attention *a, const struct sharing *s, int64_t at) {
  const int64_t width = record_width(a), queries = s->counts[at] * a->queries;
  for (int64_t i = 0; i < s->counts[at]; ++i)
    for (int64_t head = 0; head < a->heads; ++head)
      merge_partials(a->records + (s->members[at + i] * a->heads + head) * a->queries * width,
                     records_at(a, s, at) + (head * queries + i * a->queries) * width, a->queries, width);
}

int attend_shared(const struct attention *a) {
  const struct sharing s = sharing_at(a, a->workspace);
  int64_t grouped = 0;
  for (int64_t b = 0; b < a->batch; ++b) s.lengths[b] = length_of(a, b);
  for (int64_t b = 0, tokens; b + 1 < a->batch; ++b) {
    if (s.lengths[b] < length_of(a, b)) continue;
    const int64_t count = find_group(a, &s, b, s.members + grouped, &tokens);
    if (count == 1) continue;
    if (!grouped) memcpy(s.table, a->block_table, (size_t)(a->batch * a->pages) * sizeof *s.table);
    s.counts[grouped] = count;
    take_away(a, &s, s.members + grouped, count, tokens);
    attend_prefix(a, &s, grouped, tokens);
    grouped += count;
  }
  if (!grouped) return 0;
  struct attention own = *a;
  own.lengths = s.lengths, own.block_table = s.table, own.workspace = s.rest;
  attend_plainly(&own);
  for (int64_t at = 0; at < grouped; at += s.counts[at]) merge_prefix(a, &s, at);
  return 1;
}
