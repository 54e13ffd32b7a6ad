#include "visible.h"

#include <stdlib.h>

/* Uniform stretches shorter than this are joined with such neighbours, and masked where they differ. */
enum { SHORTEST_UNIFORM = 64 };

int64_t find_outside(const struct visible *v, int64_t batch, int64_t queries, int64_t tokens) {
  for (int64_t b = 0; b < batch; ++b) {
    if (v->drafts && (v->draft_begins[b] < 0 || v->draft_begins[b] + v->drafts > tokens)) return b + 1;
    const int64_t *ends = v->intervals + b * queries * 4;
    for (int64_t i = 0; i < 2 * queries; ++i, ends += 2)
      if (ends[0] < ends[1] && (ends[0] < 0 || ends[1] > tokens)) return b + 1;
  }
  return 0;
}

static int compare(const void *a, const void *b) {
  const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
  return (x > y) - (x < y);
}

/* One more stretch behind the others; those that are not uniform grow together where they touch. */
static int64_t append(struct stretch *to, int64_t count, int64_t begin, int64_t end, int uniform) {
  struct stretch *last = to + count - 1;
  if (count && !uniform && !last->uniform && last->end == begin) {
    last->end = end;
    return count;
  }
  to[count] = (struct stretch){begin, end, count ? last->before + last->end - last->begin : 0, uniform};
  return count + 1;
}

int64_t find_stretches(const struct visible *v, int64_t b, int64_t queries, int64_t *ends, struct stretch *to) {
  const int64_t *given = v->intervals + b * queries * 4;
  int64_t *begins = ends + 2 * queries, intervals = 0, count = 0;
  for (int64_t i = 0; i < 4 * queries; i += 2)
    if (given[i] < given[i + 1]) begins[intervals] = given[i], ends[intervals++] = given[i + 1];
  if (intervals > 1) {
    qsort(begins, (size_t)intervals, sizeof *begins, compare);
    qsort(ends, (size_t)intervals, sizeof *ends, compare);
  }
  for (int64_t begin = 0, end = 0, at = 0; end < intervals;) { /* begin - end intervals hold what lies before `at` */
    const int64_t next = begin < intervals ? least(begins[begin], ends[end]) : ends[end];
    if (begin > end && at < next) count = append(to, count, at, next, next - at >= SHORTEST_UNIFORM);
    for (at = next; begin < intervals && begins[begin] == at; ++begin) continue;
    for (; end < intervals && ends[end] == at; ++end) continue;
  }
  if (v->drafts) { /* a stretch of its own: a block never holds both kinds of tokens */
    to[count] = (struct stretch){v->draft_begins[b], v->draft_begins[b] + v->drafts, 0, 0};
    if (count) to[count].before = to[count - 1].before + to[count - 1].end - to[count - 1].begin;
    ++count;
  }
  return count;
}

static int is_draft(const struct visible *v, int64_t b, int64_t token) {
  return v->drafts && token >= v->draft_begins[b];
}

/* Bits begin..end of a word, of what lies below `count`. */
static uint32_t bits_between(int64_t begin, int64_t end, int64_t count) {
  begin = most(begin, 0), end = least(end, count);
  return begin < end ? (1u << end) - (1u << begin) : 0;
}

uint32_t visible_bits(const struct visible *v, int64_t b, int64_t queries, int64_t i, int64_t first, int64_t count) {
  if (is_draft(v, b, first)) {
    const int64_t j = first - v->draft_begins[b], word = j / 32, shift = j % 32;
    const uint32_t *mask = v->mask + (b * queries + i) * v->mask_words;
    uint64_t bits = mask[word];
    if (word + 1 < v->mask_words) bits |= (uint64_t)mask[word + 1] << 32;
    return (uint32_t)(bits >> shift) & ((1u << count) - 1);
  }
  const int64_t *ends = v->intervals + (b * queries + i) * 4;
  return bits_between(ends[0] - first, ends[1] - first, count) | bits_between(ends[2] - first, ends[3] - first, count);
}

/* The last run that begins at this token or before it. */
static const int64_t *run_of(const struct visible *v, int64_t token) {
  int64_t low = 0, high = v->run_count;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (v->runs[4 * middle] <= token)
      low = middle;
    else
      high = middle;
  }
  return v->runs + 4 * low;
}

void find_positions(const struct visible *v, int64_t b, int64_t begin, int64_t end, double *positions) {
  if (is_draft(v, b, begin)) {
    const int64_t *drafts = v->draft_positions + b * v->drafts - v->draft_begins[b];
    for (int64_t token = begin; token < end; ++token) *positions++ = (double)drafts[token];
    return;
  }
  for (const int64_t *run = run_of(v, begin); begin < end; run += 4)
    for (; begin < end && begin < run[0] + run[3]; ++begin) *positions++ = (double)(run[1] + (begin - run[0]) * run[2]);
}
