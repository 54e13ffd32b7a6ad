/* Matrices times a few vectors, which is what decoding is beside attention: bound by reading the matrices, once, as
 * they lie: their 16-bit elements are widened in registers.
 *
 * An output is the same sum, term by term, however many vectors and threads there are: so drafts that are verified
 * together have the bits of tokens that come alone. */
#include "simd.h"
#include "thread_pool.h"

enum { BLOCK = WIDTH, ITEM_BYTES = 1 << 16 }; /* rows whose sums are folded together; bytes of a thread's item */

/* One of the matrices, [rows, columns]. */
struct matrix {
  const char *elements;
  int64_t rows;
};

struct product {
  const struct matrix *matrices;
  const float *vectors; /* [count, padded]: in the unit order of the matrices, filled up with 0 */
  float *out;           /* [count, rows of all matrices] */
  int64_t columns, padded, count, out_rows, rows_per_item;
  int32_t type;
};

INLINE unit load_weights(int type, const char *from, int count) {
#if SIMD_AVX512
  /* By halves: matrices begin anywhere, and then each load of 64 bytes would lie in two lines. */
  if (type == BFLOAT16 && count == UNIT) {
    const __m256i first = _mm256_loadu_si256((const void *)from),
                  second = _mm256_loadu_si256((const void *)(from + 32));
    return (unit){(vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(first), 16),
                  (vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(second), 16)};
  }
  if (type == BFLOAT16) return interleave(load_part(type, from, count));
#endif
  return count == UNIT ? load_unit(type, from) : load_part(type, from, count);
}

/* Whether a unit comes apart as elements with even and with odd index; with AVX-512 load_weights() keeps their order.
 */
INLINE int comes_split(int type) { return WIDTH < 16 && is_split(type); }

/* One unit of a row times that of `count` vectors. */
INLINE void multiply_unit(const struct product *p, int type, const char *from, const float *x, int elements, int count,
                          unit *sums) {
  const unit held = load_weights(type, from, elements);
  for (int n = 0; n < count; ++n) {
    sums[n].first = multiply_add(held.first, load(x + n * p->padded), sums[n].first);
    sums[n].second = multiply_add(held.second, load(x + n * p->padded + WIDTH), sums[n].second);
  }
}

/* `rows` rows, at most BLOCK, times `count` vectors, a constant wherever this is inlined: one row after the other, as
 * one stream of memory. Two rows at a time would load the vectors once for both, but are read at a third of the rate.
 */
INLINE void multiply_block(const struct product *p, int type, const struct matrix *m, int64_t row, int rows,
                           int64_t vector_at, int count, float *out) {
  const size_t size = element_size(type);
  const char *from = m->elements + (size_t)(row * p->columns) * size;
  const float *x = p->vectors + vector_at * p->padded;
  vector lanes[4][BLOCK] = {0};
  float folded[BLOCK];
  for (int r = 0; r < rows; ++r, from += (size_t)p->columns * size) {
    unit sums[4] = {0};
    int64_t i = 0;
    for (; i + UNIT <= p->columns; i += UNIT) multiply_unit(p, type, from + i * size, x + i, UNIT, count, sums);
    if (i < p->columns) multiply_unit(p, type, from + i * size, x + i, (int)(p->columns - i), count, sums);
    for (int n = 0; n < count; ++n) lanes[n][r] = sums[n].first + sums[n].second;
  }
  for (int n = 0; n < count; ++n) {
    store(folded, sum_each(lanes[n]));
    memcpy(out + (vector_at + n) * p->out_rows, folded, sizeof(float) * (size_t)rows);
  }
}

INLINE void multiply_rows_of(const struct product *p, int type, const struct matrix *m, int64_t row, int64_t past,
                             float *out) {
  for (; row < past; row += BLOCK) {
    const int rows = past - row < BLOCK ? (int)(past - row) : BLOCK;
    int64_t at = 0;
    for (; at + 4 <= p->count; at += 4) multiply_block(p, type, m, row, rows, at, 4, out + row);
    for (; at + 2 <= p->count; at += 2) multiply_block(p, type, m, row, rows, at, 2, out + row);
    if (at < p->count) multiply_block(p, type, m, row, rows, at, 1, out + row);
  }
}

static int64_t items_of(const struct product *p, const struct matrix *m) {
  return (m->rows + p->rows_per_item - 1) / p->rows_per_item;
}

static void multiply_item(void *context, int64_t item, int worker) {
  (void)worker;
  const struct product *p = context;
  const struct matrix *m = p->matrices;
  float *out = p->out;
  for (; item >= items_of(p, m); ++m) {
    item -= items_of(p, m);
    out += m->rows;
  }
  const int64_t row = item * p->rows_per_item;
  const int64_t past = row + p->rows_per_item < m->rows ? row + p->rows_per_item : m->rows;
  switch (p->type) {
  case FLOAT32:
    multiply_rows_of(p, FLOAT32, m, row, past, out);
    break;
  case FLOAT16:
    multiply_rows_of(p, FLOAT16, m, row, past, out);
    break;
  case BFLOAT16:
    multiply_rows_of(p, BFLOAT16, m, row, past, out);
    break;
  }
}

/* The vectors in the order in which elements of the matrices come apart. */
static void order_vectors(int type, const float *vectors, int64_t count, int64_t columns, int64_t padded, float *to) {
  for (int64_t n = 0; n < count; ++n)
    for (int64_t i = 0; i < columns; i += UNIT) {
      const float *from = vectors + n * columns + i;
      const int64_t left = columns - i;
      unit u =
          left >= UNIT ? load_unit(FLOAT32, (const char *)from) : load_part(FLOAT32, (const char *)from, (int)left);
      if (comes_split(type)) u = split(u);
      store(to + n * padded + i, u.first);
      store(to + n * padded + i + WIDTH, u.second);
    }
}

/* out [count, rows of all matrices] = vectors [count, columns] times the transposed of `parts` matrices, whose outputs
 * stand side by side. workspace: (count + 1) * (columns + 32) numbers. */
void multiply_rows(const struct matrix *matrices, int64_t parts, int64_t columns, int64_t type, const float *vectors,
                   int64_t count, float *workspace, float *out, int64_t threads) {
  const int64_t padded = (columns + UNIT - 1) / UNIT * UNIT;
  const int64_t block_bytes = BLOCK * (int64_t)element_size((enum element_type)type) * (columns > 0 ? columns : 1);
  const int64_t blocks = block_bytes < ITEM_BYTES ? ITEM_BYTES / block_bytes : 1;
  struct product p = {matrices, workspace, out, columns, padded, count, 0, blocks * BLOCK, (int32_t)type};
  int64_t items = 0;
  for (int64_t i = 0; i < parts; ++i) {
    p.out_rows += matrices[i].rows;
    items += items_of(&p, matrices + i);
  }
  workspace += -((uintptr_t)workspace / sizeof(float)) % UNIT; /* no vector of it lies in two lines */
  p.vectors = workspace;
  order_vectors(p.type, vectors, count, columns, padded, workspace);
  run_items((int)threads, items, multiply_item, &p);
}
