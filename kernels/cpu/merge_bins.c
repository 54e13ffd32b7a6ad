/* The merge of records of bins.h: maxima, shifts and sums modulo 2^64, so associative and commutative on all words. */
#include "bins.h"

/* Sums [upper, lower] of `count` numbers each; `bins`: how much lower the top of `from` is. */
static void add_sums(uint64_t *restrict to, const uint64_t *restrict from, int64_t count, int64_t bins) {
  if (bins == 0)
    for (int64_t i = 0; i < 2 * count; ++i) to[i] += from[i];
  else if (bins == 1)
    for (int64_t i = 0; i < count; ++i) to[count + i] += from[i];
}

static void merge_record(int64_t *into, const int64_t *other, int64_t v_dim) {
  const struct exponents a = exponents_of(into), b = exponents_of(other);
  const struct exponents both = {higher(a.weight, b.weight), higher(a.value, b.value)};
  raise_record(into, v_dim, both);
  uint64_t *to = (uint64_t *)into;
  const uint64_t *from = (const uint64_t *)other;
  add_sums(to + BINS_DENOMINATOR, from + BINS_DENOMINATOR, 1, top_of_weights(both) - top_of_weights(b));
  add_sums(to + BINS_NUMERATOR, from + BINS_NUMERATOR, v_dim, top_of_products(both) - top_of_products(b));
}

void merge_bins(int64_t *into, const int64_t *other, int64_t records, int64_t width) {
  for (int64_t i = 0; i < records; ++i) merge_record(into + i * width, other + i * width, (width - BINS_NUMERATOR) / 2);
}
