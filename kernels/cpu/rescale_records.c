/* Records over one maximum that all ranks share, so that plain sums merge them. */
#include "records.h"

#include "exponential.h"

/* What a record's sums are multiplied by. Nothing seen counts for nothing, whatever it holds. */
static float factor_of(float own, float shared) {
  if (own != own) return (float)NAN;
  if (own == -INFINITY) return 0.0f;
  return own == shared ? 1.0f : exponential(own - shared);
}

void rescale_records(const float *records, const float *shared, float *denominators, int64_t denominator_stride,
                     float *numerators, int64_t numerator_stride, int64_t count, int64_t width) {
  for (int64_t i = 0; i < count; ++i) {
    const float *restrict record = records + i * width;
    float *restrict numerator = numerators + i * numerator_stride;
    const float factor = factor_of(record[RECORD_MAX], shared[i]);
    const int empty = record[RECORD_MAX] == -INFINITY;
    denominators[i * denominator_stride] = empty ? 0.0f : factor * record[RECORD_DENOMINATOR];
    for (int64_t j = 0; j < width - RECORD_NUMERATOR; ++j)
      numerator[j] = empty ? 0.0f : factor * record[RECORD_NUMERATOR + j];
  }
}
