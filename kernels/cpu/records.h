/* Records (partials of one query head: max, denominator, numerator[head_dim]) and what is done with them.
 * The definitions, in NumPy, are in treeattn/partial.py. */
#ifndef TREEATTN_RECORDS_H
#define TREEATTN_RECORDS_H

#include <math.h>
#include <stdint.h>

enum { RECORD_MAX = 0, RECORD_DENOMINATOR = 1, RECORD_NUMERATOR = 2 };

/* One NaN for all: which operand's payload survives an operation differs between processors. */
static inline float canonical(float value) { return value == value ? value : (float)NAN; }

/* Nothing seen yet: merging it changes nothing. */
static inline void set_identity(float *record, int64_t width) {
  record[RECORD_MAX] = -INFINITY;
  for (int64_t i = 1; i < width; ++i) record[i] = 0.0f;
}

/* Fold `other` into `into`: `records` records of `width` floats each. */
void merge_partials(float *into, const float *other, int64_t records, int64_t width);

/* Denominator and numerator of each record, rescaled from its own maximum to `shared`, which is at least that. They may
 * lie apart or packed: strides count elements from one record to the next. */
void rescale_records(const float *records, const float *shared, float *denominators, int64_t denominator_stride,
                     float *numerators, int64_t numerator_stride, int64_t count, int64_t width);

/* Records [batch, heads, queries, width] to out [batch, queries, heads, width - 2] and
 * lse [batch, heads, queries]. */
void finish(const float *records, float *out, float *lse, int64_t batch, int64_t heads, int64_t queries, int64_t width);

#endif
