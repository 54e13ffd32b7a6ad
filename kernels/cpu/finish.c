/* Records to attention output. Basic operations only, so that the bits are the same on every processor. */
#include "logarithm.h"
#include "records.h"

static void fill(float *out, float value, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = value;
}

static void finish_record(const float *record, float *out, float *lse, int64_t head_dim) {
  const float maximum = record[RECORD_MAX], denominator = record[RECORD_DENOMINATOR];
  const int bounded = maximum < INFINITY; /* not for NaN */
  if (maximum == -INFINITY || (bounded && denominator == 0.0f)) {
    fill(out, 0.0f, head_dim); /* nothing was seen */
    *lse = -INFINITY;
  } else if (bounded && denominator > 0.0f && denominator < INFINITY) {
    for (int64_t i = 0; i < head_dim; ++i) out[i] = canonical(record[RECORD_NUMERATOR + i] / denominator);
    *lse = (float)((double)maximum + logarithm(denominator));
  } else {
    fill(out, (float)NAN, head_dim);
    *lse = (float)NAN;
  }
}

void finish(const float *records, float *out, float *lse, int64_t batch, int64_t heads, int64_t queries,
            int64_t width) {
  const int64_t head_dim = width - RECORD_NUMERATOR;
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < queries; ++i) {
        int64_t row = (b * heads + h) * queries + i;
        finish_record(records + row * width, out + ((b * queries + i) * heads + h) * head_dim, lse + row, head_dim);
      }
}
