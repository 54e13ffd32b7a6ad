/* Ranks as threads: every rank's program of one schedule over shared memory, for ThreadSanitizer.
 *
 * Usage: step_twin FILE, 64-bit words: base and bytes of the block that all addresses lie in, ranks, steps, spins,
 * width; per rank: address, bytes, first byte and bytes of the promised part of its records, and instructions of a
 * program; then per rank both programs; initial records; wanted ones. All ranks start every step from the same records.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "step.c"

void merge_partials(void *into, const void *other, int64_t records, int64_t width);

struct block {
  int64_t base, bytes, ranks, steps, spins, width;
};

struct rank {
  int64_t records, bytes, first, promised, length;
  struct instruction *programs[2];
  char *initial, *wanted;
  pthread_t thread;
};

static struct block block;
static char *memory;
static FILE *file;

static void *take(int64_t bytes) {
  void *taken = calloc(1, bytes + 1);
  if (!taken || fread(taken, 1, bytes, file) != (size_t)bytes) abort();
  return taken;
}

/* Addresses of the block as it was, and as it is here. */
static void move(struct instruction *program, int64_t length) {
  for (int64_t i = 0; i < length; ++i) {
    program[i].into = memory + ((int64_t)program[i].into - block.base);
    if (program[i].source) program[i].source = memory + ((int64_t)program[i].source - block.base);
  }
}

static void *run_rank(void *argument) {
  struct rank *rank = argument;
  char *records = memory + (rank->records - block.base);
  struct step step = {.merge = merge_partials,
                      .programs = {rank->programs[0], rank->programs[1]},
                      .length = rank->length,
                      .number = 1,
                      .spins = block.spins,
                      .awake = INT64_MAX,
                      .width = block.width};
  for (int64_t number = 0; number < block.steps; ++number) {
    memcpy(records, rank->initial, rank->bytes);
    int64_t result = run_step(&step, INT64_C(60000000000));
    if (result != DONE || memcmp(records + rank->first, rank->wanted, rank->promised)) {
      printf("step %d: result %d, or other bits\n", (int)number, (int)result);
      exit(2);
    }
  }
  return NULL;
}

int main(int count, char **arguments) {
  file = count == 2 ? fopen(arguments[1], "rb") : NULL;
  if (!file || fread(&block, sizeof block, 1, file) != 1) return 3;
  memory = aligned_alloc(128, (block.bytes + 127) / 128 * 128);
  memset(memory, 0, block.bytes);
  struct rank *ranks = calloc(block.ranks, sizeof *ranks);
  for (struct rank *rank = ranks; rank < ranks + block.ranks; ++rank)
    if (fread(rank, sizeof(int64_t), 5, file) != 5) return 3;
  for (struct rank *rank = ranks; rank < ranks + block.ranks; ++rank)
    for (int parity = 0; parity < 2; ++parity) {
      rank->programs[parity] = take(rank->length * sizeof(struct instruction));
      move(rank->programs[parity], rank->length);
    }
  for (struct rank *rank = ranks; rank < ranks + block.ranks; ++rank) {
    rank->initial = take(rank->bytes);
    rank->wanted = take(rank->promised);
  }
  for (struct rank *rank = ranks; rank < ranks + block.ranks; ++rank)
    pthread_create(&rank->thread, NULL, run_rank, rank);
  for (struct rank *rank = ranks; rank < ranks + block.ranks; ++rank) pthread_join(rank->thread, NULL);
  puts("done");
  return 0;
}
