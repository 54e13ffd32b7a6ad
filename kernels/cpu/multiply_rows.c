/* Matrices times a few vectors, which is what decoding is beside attention: bound by reading the matrices, once, as
 * they lie: their elements of 16 bits are widened in registers.
 *
 * An output is the same sum, term by term, however many vectors and threads there are: so drafts that are verified
 * together have the bits of tokens that come alone. */
#include "simd.h"
#include "thread_pool.h"

enum { BLOCK = WIDTH, ITEM_BYTES = 1 << 16 }; /* rows whose sums are folded together; bytes of a thread's item */

/* Vectors of a pass, at most; and how many bytes ahead a matrix is asked for, into the second cache, where there is
 * more to do than to read it. Measured on an AMD EPYC 9004 (Zen 4). */
enum { MOST_VECTORS = 4, AHEAD = 8192 };

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

/* Rows that go through at once: each number of a vector is loaded once for all of them. Otherwise one row after the
 * other: memory is read fastest as one stream. */
INLINE int rows_together(int count) { return WIDTH == 16 && count > 2 ? 2 : 1; }

/* One unit of some rows times that of `count` vectors. */
INLINE void multiply_unit(const struct product *p, int type, const char *from, int64_t row_bytes, const float *x,
                          int elements, int count, unit sums[][MOST_VECTORS]) {
  const int rows = rows_together(count);
  unit held[2];
  for (int r = 0; r < rows; ++r, from += row_bytes) {
    held[r] = load_weights(type, from, elements);
    for (size_t i = 0; count > 1 && i < UNIT * element_size(type); i += 64) __builtin_prefetch(from + AHEAD + i, 0, 2);
  }
  for (int n = 0; n < count; ++n) {
    const vector first = load(x + n * p->padded), second = load(x + n * p->padded + WIDTH);
    const unit loaded = rows > 1 ? (unit){in_register(first), in_register(second)} : (unit){first, second};
    for (int r = 0; r < rows; ++r) {
      sums[r][n].first = multiply_add(held[r].first, loaded.first, sums[r][n].first);
      sums[r][n].second = multiply_add(held[r].second, loaded.second, sums[r][n].second);
    }
  }
}

/* `rows` rows, at most BLOCK, times `count` vectors, a constant wherever this is inlined. */
INLINE void multiply_block(const struct product *p, int type, const struct matrix *m, int64_t row, int rows,
                           int64_t vector_at, int count, float *out) {
  const int64_t size = (int64_t)element_size(type), row_bytes = p->columns * size;
  const char *from = m->elements + row * row_bytes;
  const float *x = p->vectors + vector_at * p->padded;
  const int together = rows_together(count);
  vector lanes[MOST_VECTORS][BLOCK];
  float folded[BLOCK];
  if (rows < BLOCK) memset(lanes, 0, sizeof lanes);
  for (int r = 0; r < rows; r += together, from += together * row_bytes) {
    const int64_t next = r + together > rows ? 0 : row_bytes; /* an odd last row twice */
    unit sums[2][MOST_VECTORS] = {0};
    int64_t i = 0;
    for (; i + UNIT <= p->columns; i += UNIT) multiply_unit(p, type, from + i * size, next, x + i, UNIT, count, sums);
    if (i < p->columns) multiply_unit(p, type, from + i * size, next, x + i, (int)(p->columns - i), count, sums);
    for (int n = 0; n < count; ++n)
      for (int t = 0; t < together; ++t) lanes[n][r + t] = sums[t][n].first + sums[t][n].second;
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
    if (p->count - at == 3) multiply_block(p, type, m, row, rows, at, 3, out + row);
    if (p->count - at == 2) multiply_block(p, type, m, row, rows, at, 2, out + row);
    if (p->count - at == 1) multiply_block(p, type, m, row, rows, at, 1, out + row);
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
  if (p->type == FLOAT32) multiply_rows_of(p, FLOAT32, m, row, past, out);
  if (p->type == FLOAT16) multiply_rows_of(p, FLOAT16, m, row, past, out);
  if (p->type == BFLOAT16) multiply_rows_of(p, BFLOAT16, m, row, past, out);
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
