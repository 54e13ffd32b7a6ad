/* What one core can do at best, to measure the attention kernel against: read memory, multiply and add. */
#include <stdint.h>

#include "simd.h"
#include "thread_pool.h"

/* Memory is fastest when read like this: a piece of each of many streams in turn, asked for some pieces ahead, and
 * streams not a power of two apart (17 GB/s against 13 from front to back, where this was written). */
enum { PIECE = 512, PIECES = 127, STREAMS = 32, AHEAD = 2, REGION = STREAMS * PIECES * PIECE };
enum { VECTORS = PIECE / sizeof(vector), SUMS = VECTORS < 8 ? VECTORS : 8 };

INLINE void read_piece(const char *from, vector_bits *sum) {
  for (int i = 0; i < VECTORS; ++i) {
    vector_bits bits;
    memcpy(&bits, from + (size_t)i * sizeof bits, sizeof bits);
    sum[i % SUMS] ^= bits;
  }
}

static void read_region(const char *from, vector_bits *sum) {
  for (int piece = 0; piece < PIECES; ++piece)
    for (int stream = 0; stream < STREAMS; ++stream) {
      const char *at = from + (stream * PIECES + piece) * PIECE;
      for (int line = 0; line < PIECE; line += 64) __builtin_prefetch(at + AHEAD * PIECE + line);
      read_piece(at, sum);
    }
}

struct reading {
  const char *from, *end;
  uint32_t result[MAX_THREADS];
};

static void read_item(void *context, int64_t item, int worker) {
  struct reading *r = context;
  vector_bits sum[SUMS] = {{0}};
  const char *from = r->from + item * REGION;
  if (r->end - from >= REGION)
    read_region(from, sum);
  else
    for (; r->end - from >= PIECE; from += PIECE) read_piece(from, sum);
  for (int i = 0; i < SUMS; ++i)
    for (int lane = 0; lane < WIDTH; ++lane) r->result[worker] ^= sum[i][lane];
}

/* Reads the `bytes` at `from`, but less than a piece at either end. The result, their xor, is of no use but that
 * nothing can be left out. */
uint32_t read_memory(const char *from, int64_t bytes, int32_t threads) {
  struct reading r = {.from = from + -(uintptr_t)from % 64, .end = from + bytes};
  run_items(threads, (r.end - r.from + REGION - 1) / REGION, read_item, &r);
  uint32_t result = 0;
  for (int i = 0; i < MAX_THREADS; ++i) result ^= r.result[i];
  return result;
}

/* `rounds` times as many multiply-adds as fill the pipelines of one core. Returns how many numbers were multiplied. */
int64_t multiply_and_add(int64_t rounds, float *result) {
  enum { CHAINS = REGISTERS / 2 };
  vector sum[CHAINS];
  const vector factor = splat(result[0]);
  for (int i = 0; i < CHAINS; ++i) sum[i] = splat((float)i);
  for (int64_t round = 0; round < rounds; ++round)
    for (int i = 0; i < CHAINS; ++i) sum[i] = multiply_add(sum[i], factor, factor);
  for (int i = 1; i < CHAINS; ++i) sum[0] += sum[i];
  *result = sum_lanes(sum[0]);
  return rounds * CHAINS * WIDTH;
}
