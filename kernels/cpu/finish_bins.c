/* Records of bins.h to attention output. Basic operations only, so that the bits are the same on every processor. */
#include "bins.h"
#include "logarithm.h"

/* What two bins hold in units of the lower one. */
static double number_of(int64_t upper, int64_t lower) { return (double)upper * 0x1p41 + (double)lower; }

static void fill(float *out, float value, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = value;
}

static void finish_record(const int64_t *restrict record, float *restrict out, float *lse, int64_t v_dim) {
  const struct exponents e = exponents_of(record);
  const int64_t *upper = record + BINS_NUMERATOR, *lower = upper + v_dim;
  const double denominator = number_of(record[BINS_DENOMINATOR], record[BINS_DENOMINATOR + 1]);
  if (e.weight <= EMPTY) {
    fill(out, 0.0f, v_dim); /* nothing was seen */
    *lse = -INFINITY;
    return;
  }
  const int spoiled = e.weight >= SPOILED || !(denominator > 0);
  *lse = spoiled ? (float)NAN
                 : (float)((double)(STEP * (top_of_weights(e) - 1)) * 0.6931471805599453 + logarithm(denominator));
  if (spoiled || e.value >= SPOILED) {
    fill(out, (float)NAN, v_dim);
    return;
  }
  /* Quotients are 0 or in 2^-105 .. 2^105: beyond these bounds a float is 0 or infinite at the bound already. */
  int64_t apart = STEP * (top_of_products(e) - top_of_weights(e));
  apart = apart < -1022 ? -1022 : apart > 1023 ? 1023 : apart;
  const double unit = ldexp(1.0, (int)apart);
  for (int64_t i = 0; i < v_dim; ++i) out[i] = (float)(number_of(upper[i], lower[i]) / denominator * unit);
}

void finish_bins(const int64_t *records, float *out, float *lse, int64_t batch, int64_t heads, int64_t queries,
                 int64_t width) {
  const int64_t v_dim = (width - BINS_NUMERATOR) / 2;
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < queries; ++i) {
        const int64_t row = (b * heads + h) * queries + i;
        finish_record(records + row * width, out + ((b * queries + i) * heads + h) * v_dim, lse + row, v_dim);
      }
}
