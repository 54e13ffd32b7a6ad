/* The merge of records of bins.h: maxima, shifts and sums modulo 2^64, so associative and commutative on all words. */
#include "bins.h"

/* `bins`: how much lower the top of the other sums is. */
static void add_sums(uint64_t *upper, uint64_t *lower, const uint64_t *up, const uint64_t *low, int64_t count,
                     int64_t bins) {
  if (bins == 0)
    for (int64_t i = 0; i < count; ++i) upper[i] += up[i], lower[i] += low[i];
  else if (bins == 1)
    for (int64_t i = 0; i < count; ++i) lower[i] += up[i];
}

static void merge_record(int64_t *into, const int64_t *other, int64_t v_dim) {
  const struct exponents a = exponents_of(into), b = exponents_of(other);
  const struct exponents both = {higher(a.weight, b.weight), higher(a.value, b.value)};
  raise_record(into, v_dim, both);
  uint64_t *to = (uint64_t *)into + BINS_DENOMINATOR;
  const uint64_t *from = (const uint64_t *)other + BINS_DENOMINATOR;
  add_sums(to, to + 1, from, from + 1, 1, top_of_weights(both) - top_of_weights(b));
  to += BINS_NUMERATOR - BINS_DENOMINATOR, from += BINS_NUMERATOR - BINS_DENOMINATOR;
  add_sums(to, to + v_dim, from, from + v_dim, v_dim, top_of_products(both) - top_of_products(b));
}

void merge_bins(int64_t *into, const int64_t *other, int64_t records, int64_t width) {
  for (int64_t i = 0; i < records; ++i) merge_record(into + i * width, other + i * width, (width - BINS_NUMERATOR) / 2);
}
