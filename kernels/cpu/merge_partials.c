/* The merge of partials, defined to the bit by treeattn/partial.py: every build gives the same bits. */
#include "records.h"

#include "exponential.h"

static void set_nan(float *record, int64_t width) {
  for (int64_t i = 0; i < width; ++i) record[i] = (float)NAN;
}

/* into + factor * other: the operand of the call has the smaller maximum, or an equal one. */
static void add_scaled(float *restrict into, const float *restrict other, float factor, int64_t width) {
  for (int64_t i = 1; i < width; ++i) into[i] = canonical(fmaf(factor, other[i], into[i]));
}

/* factor * into + other: what is there already has the smaller maximum. */
static void scale_and_add(float *restrict into, const float *restrict other, float factor, int64_t width) {
  for (int64_t i = 1; i < width; ++i) into[i] = canonical(fmaf(factor, into[i], other[i]));
}

static void copy(float *restrict into, const float *other, int64_t width) {
  for (int64_t i = 1; i < width; ++i) into[i] = canonical(other[i]);
}

static void merge_record(float *into, const float *other, int64_t width) {
  const float ours = into[RECORD_MAX], theirs = other[RECORD_MAX];
  const float high = theirs > ours ? theirs : ours, low = theirs > ours ? ours : theirs;
  if (ours != ours || theirs != theirs) {
    set_nan(into, width);
    return;
  }
  if (high == -INFINITY) {
    set_identity(into, width);
    return;
  }
  if (low == -INFINITY) {
    copy(into, ours < theirs ? other : into, width);
  } else {
    float factor = high == low ? 1.0f : exponential(low - high);
    (ours < theirs ? scale_and_add : add_scaled)(into, other, factor, width);
  }
  into[RECORD_MAX] = high + 0.0f; /* -0 and +0 are equal maxima: always +0 */
}

void merge_partials(float *into, const float *other, int64_t records, int64_t width) {
  for (int64_t i = 0; i < records; ++i) merge_record(into + i * width, other + i * width, width);
}
