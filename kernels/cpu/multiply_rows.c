/* A matrix times a few vectors, which is what decoding is beside attention: bound by reading the matrix, once.
 *
 * An output is the same sum, term by term, however many vectors and threads there are: so drafts that are verified
 * together have the bits of tokens that come alone. */
#include "simd.h"
#include "thread_pool.h"

enum { BLOCK = WIDTH, ITEM_BYTES = 1 << 16 }; /* rows whose sums are folded together; bytes of a thread's item */

struct product {
  const float *matrix, *vectors;
  float *out;
  int64_t rows, columns, count, rows_per_item;
};

/* `rows` rows times `count` vectors, constants wherever this is inlined: lanes to add, and what is left beyond whole
 * vectors. Vector n of row r goes to [n][at + r]. */
INLINE void multiply_some(const struct product *p, int64_t row, int64_t vector_at, int at, int rows, int count,
                          vector (*lanes)[BLOCK], float (*rest)[BLOCK]) {
  const float *from = p->matrix + row * p->columns, *vectors = p->vectors + vector_at * p->columns;
  vector sums[4][4] = {0};
  int64_t i = 0;
  for (; i + WIDTH <= p->columns; i += WIDTH) {
    vector held[4];
    for (int r = 0; r < rows; ++r) held[r] = load(from + r * p->columns + i);
    for (int n = 0; n < count; ++n) {
      const vector x = load(vectors + n * p->columns + i);
      for (int r = 0; r < rows; ++r) sums[n][r] = multiply_add(held[r], x, sums[n][r]);
    }
  }
  for (int n = 0; n < count; ++n)
    for (int r = 0; r < rows; ++r) {
      float left = 0.0f;
      for (int64_t j = i; j < p->columns; ++j) left = fmaf(from[r * p->columns + j], vectors[n * p->columns + j], left);
      lanes[n][at + r] = sums[n][r];
      rest[n][at + r] = left;
    }
}

/* At most BLOCK rows times `count` vectors: one row at a time where reading it is what takes the time, as one stream
 * of memory; several for several vectors, which are then loaded once for them. */
INLINE void multiply_block(const struct product *p, int64_t row, int64_t vector_at, int count) {
  const int rows = p->rows - row < BLOCK ? (int)(p->rows - row) : BLOCK;
  const int together = count == 1 ? 1 : REGISTERS >= 32 ? 4 : 2;
  vector lanes[4][BLOCK] = {0};
  float rest[4][BLOCK] = {0}, sums[BLOCK];
  int at = 0;
  for (; at + together <= rows; at += together) multiply_some(p, row + at, vector_at, at, together, count, lanes, rest);
  for (; at < rows; ++at) multiply_some(p, row + at, vector_at, at, 1, count, lanes, rest);
  for (int n = 0; n < count; ++n) {
    store(sums, sum_each(lanes[n]) + load(rest[n]));
    memcpy(p->out + (vector_at + n) * p->rows + row, sums, sizeof(float) * (size_t)rows);
  }
}

static void multiply_item(void *context, int64_t item, int worker) {
  (void)worker;
  const struct product *p = context;
  const int64_t begin = item * p->rows_per_item, past = begin + p->rows_per_item;
  for (int64_t row = begin; row < past && row < p->rows; row += BLOCK) {
    int64_t at = 0;
    for (; at + 4 <= p->count; at += 4) multiply_block(p, row, at, 4);
    for (; at + 2 <= p->count; at += 2) multiply_block(p, row, at, 2);
    if (at < p->count) multiply_block(p, row, at, 1);
  }
}

/* out [count, rows] = vectors [count, columns] times the transposed of matrix [rows, columns]. */
void multiply_rows(const float *matrix, const float *vectors, float *out, int64_t rows, int64_t columns, int64_t count,
                   int64_t threads) {
  const int64_t block_bytes = 4 * BLOCK * (columns > 0 ? columns : 1);
  const int64_t blocks = block_bytes < ITEM_BYTES ? ITEM_BYTES / block_bytes : 1, rows_per_item = blocks * BLOCK;
  struct product product = {matrix, vectors, out, rows, columns, count, rows_per_item};
  run_items((int)threads, (rows + rows_per_item - 1) / rows_per_item, multiply_item, &product);
}
