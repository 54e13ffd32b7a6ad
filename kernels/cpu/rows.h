/* A row is one query head of one query: its q on the way in, its record on the way out. In between, elements are in
 * the unit order of the cache's type. */
#ifndef TREEATTN_ROWS_H
#define TREEATTN_ROWS_H

#include "partial_attention.h"
#include "records.h"
#include "simd.h"

/* Elements rounded up to whole units. */
static inline int64_t whole_units(int64_t elements) { return (elements + UNIT - 1) / UNIT * UNIT; }

/* What elements of a KV head are multiplied with, as they are loaded. */
static inline float scale_of(const struct attention *a, const float *scales, int64_t kv_head) {
  return unit_factor(a->kv_type) * (scales ? scales[kv_head] : 1.0f);
}

/* One row of q to float32, scaled, in the unit order of the keys, padded with 0. */
static inline void widen_query(const struct attention *a, const char *from, float scale, float *to) {
  for (int64_t d = 0; d < a->head_dim; d += UNIT) {
    const int64_t left = a->head_dim - d;
    const char *at = from + d * (int64_t)element_size(a->q_type);
    unit u = left >= UNIT ? load_unit(a->q_type, at) : load_part(a->q_type, at, (int)left);
    if (is_split(a->q_type) && !is_split(a->kv_type)) u = interleave(u);
    if (!is_split(a->q_type) && is_split(a->kv_type)) u = split(u);
    store(to + d, u.first * splat(scale));
    store(to + d + WIDTH, u.second * splat(scale));
  }
}

static inline void write_numerator(const struct attention *a, float *numerator, float factor, float *to) {
  if (is_split(a->kv_type))
    for (int64_t d = 0; d < a->v_dim; d += UNIT) {
      const unit u = interleave((unit){load(numerator + d), load(numerator + d + WIDTH)});
      store(numerator + d, u.first);
      store(numerator + d + WIDTH, u.second);
    }
  for (int64_t i = 0; i < a->v_dim; ++i) to[i] = canonical(factor * numerator[i]);
}

/* What was summed up to a record: sums times `factor`, those of values times `v_scale` too. numerator: whole units,
 * brought to memory order in place. */
static inline void write_row(const struct attention *a, float maximum, float denominator, float factor, float v_scale,
                             float *numerator, float *record) {
  const int64_t width = a->v_dim + RECORD_NUMERATOR;
  if (denominator != denominator) { /* a NaN score: all of the row is NaN */
    for (int64_t i = 0; i < width; ++i) record[i] = (float)NAN;
  } else if (maximum == -INFINITY) {
    set_identity(record, width);
  } else {
    record[RECORD_MAX] = maximum;
    record[RECORD_DENOMINATOR] = factor * denominator;
    write_numerator(a, numerator, v_scale * factor, record + RECORD_NUMERATOR);
  }
}

#endif
