/* What one core can do at best, to measure the attention kernel against: read memory, multiply and add. */
#include <stdint.h>

#include "simd.h"
#include "thread_pool.h"

/* How memory is read: a piece of each of some streams in turn, and lines asked for some way ahead. Which way is the
 * fastest differs between processors, by a factor of two either way where this was tried. Streams are not a power of
 * two apart, lest they fall into one set of the cache. */
enum { LINE = 64, REGION = 1 << 21, VECTORS = LINE / sizeof(vector) };

struct reading {
  const char *from, *end;
  int64_t streams, piece, pieces, ahead; /* piece: bytes that a stream is read in a turn; pieces: of one stream */
  uint32_t result[MAX_THREADS];
};

static int64_t region_of(const struct reading *r) { return r->streams * r->pieces * r->piece; }

INLINE void read_lines(const char *from, int64_t bytes, int64_t ahead, vector_bits *sum) {
  for (int64_t line = 0; line < bytes; line += LINE) {
    if (ahead) __builtin_prefetch(from + line + ahead);
    for (int i = 0; i < VECTORS; ++i) {
      vector_bits bits;
      memcpy(&bits, from + line + i * (int64_t)sizeof bits, sizeof bits);
      sum[i] ^= bits;
    }
  }
}

static void read_item(void *context, int64_t item, int worker) {
  struct reading *r = context;
  vector_bits sum[VECTORS] = {{0}};
  const char *from = r->from + item * region_of(r);
  if (r->end - from < region_of(r))
    read_lines(from, (r->end - from) / LINE * LINE, 0, sum);
  else
    for (int64_t piece = 0; piece < r->pieces; ++piece)
      for (int64_t stream = 0; stream < r->streams; ++stream)
        read_lines(from + (stream * r->pieces + piece) * r->piece, r->piece, r->ahead, sum);
  for (int i = 0; i < VECTORS; ++i)
    for (int lane = 0; lane < WIDTH; ++lane) r->result[worker] ^= sum[i][lane];
}

/* Reads the `bytes` at `from`, but less than a line at either end, from `streams` places in turn: `lines` lines of 64
 * bytes of each, and asks for the line `ahead` lines further on; 0: for none. The result, the xor of all, is of no use
 * but that nothing can be left out. */
uint32_t read_memory(const char *from, int64_t bytes, int32_t threads, int32_t streams, int32_t lines, int32_t ahead) {
  struct reading r = {.from = from + -(uintptr_t)from % LINE, .end = from + bytes, .streams = streams};
  r.piece = (int64_t)lines * LINE, r.ahead = (int64_t)ahead * LINE;
  r.pieces = REGION / (r.streams * r.piece) | 1;
  run_items(threads, (r.end - r.from + region_of(&r) - 1) / region_of(&r), read_item, &r);
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
