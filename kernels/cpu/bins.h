/* Records of attention whose bits depend on the set of tokens alone: two bins of whole numbers for every sum. The
 * definition, in NumPy, is treeattn/bins.py; the proof is docs/exactness.md. */
#ifndef TREEATTN_BINS_H
#define TREEATTN_BINS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { STEP = 41, EMPTY = -(1 << 28), SPOILED = 1 << 28 };

/* Words of a record: exponents, denominator (upper, lower), upper[v_dim], lower[v_dim]. */
enum { BINS_DENOMINATOR = 1, BINS_NUMERATOR = 3 };
static inline int64_t bins_width(int64_t v_dim) { return BINS_NUMERATOR + 2 * v_dim; }

struct exponents {
  int32_t weight, value; /* weights are below 2^(weight + 1), values below 2^(value + 1); or EMPTY, SPOILED */
};

static inline struct exponents exponents_of(const int64_t *record) {
  struct exponents e;
  memcpy(&e, record, sizeof e);
  return e;
}

static inline void set_exponents(int64_t *record, struct exponents e) { memcpy(record, &e, sizeof e); }

static inline void set_no_tokens(int64_t *record, int64_t v_dim) {
  memset(record, 0, (size_t)bins_width(v_dim) * sizeof *record);
  set_exponents(record, (struct exponents){EMPTY, EMPTY});
}

static inline int32_t higher(int32_t a, int32_t b) { return a > b ? a : b; }

static inline int64_t floor_step(int64_t bits) { return (bits >= 0 ? bits : bits - (STEP - 1)) / STEP; }
static inline int64_t top_of_weights(struct exponents e) { return floor_step((int64_t)e.weight + 1); }
static inline int64_t top_of_products(struct exponents e) { return floor_step((int64_t)e.weight + e.value + 2); }

static inline void raise_sums(uint64_t *upper, uint64_t *lower, int64_t count, int64_t bins) {
  if (bins == 0) return;
  for (int64_t i = 0; i < count; ++i) lower[i] = bins == 1 ? upper[i] : 0, upper[i] = 0;
}

/* A record to exponents that are at least its own. */
static inline void raise_record(int64_t *record, int64_t v_dim, struct exponents to) {
  const struct exponents from = exponents_of(record);
  uint64_t *sums = (uint64_t *)record + BINS_DENOMINATOR;
  raise_sums(sums, sums + 1, 1, top_of_weights(to) - top_of_weights(from));
  sums += BINS_NUMERATOR - BINS_DENOMINATOR;
  raise_sums(sums, sums + v_dim, v_dim, top_of_products(to) - top_of_products(from));
  set_exponents(record, to);
}

/* Fold `other` into `into`: `records` records of `width` words each. */
void merge_bins(int64_t *into, const int64_t *other, int64_t records, int64_t width);

/* Records [batch, heads, queries, width] to out [batch, queries, heads, v_dim] and lse [batch, heads, queries]. */
void finish_bins(const int64_t *records, float *out, float *lse, int64_t batch, int64_t heads, int64_t queries,
                 int64_t width);

#endif
