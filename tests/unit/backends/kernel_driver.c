/* Runs one kernel on what it reads from standard input: for processors and sanitizers that Python cannot be run on.
 * First comes a line: a verb and its numbers; then the arrays, each in memory of exactly its size. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "partial_attention.h"
#include "records.h"

static void *take(int64_t bytes) {
  void *memory = malloc((size_t)bytes);
  if (fread(memory, 1, (size_t)bytes, stdin) != (size_t)bytes) exit(3);
  return memory;
}

static void give(const void *memory, int64_t bytes) { fwrite(memory, 1, (size_t)bytes, stdout); }

/* Counts of runs, drafts and words of the mask, whether there are slopes, the soft cap; pages of a sequence, 0 where
 * tokens lie in a row, and tokens of a page; then the tables. */
static void take_tables(struct attention *a, struct visible *v) {
  long n[6];
  if (scanf("%ld %ld %ld %ld %f %ld %ld", n, n + 1, n + 2, n + 3, &v->softcap, n + 4, n + 5) != 7) exit(2);
  getchar();
  a->pages = n[4], a->page_size = n[5];
  v->run_count = n[0], v->drafts = n[1], v->mask_words = n[2];
  const int64_t rows = a->batch * a->queries, size = (int64_t)sizeof(int64_t);
  v->intervals = take(4 * rows * size);
  v->q_positions = take(rows * size);
  v->runs = take(4 * v->run_count * size);
  v->slopes = n[3] ? take(a->heads * size) : NULL;
  v->mask = take(rows * v->mask_words * (int64_t)sizeof(uint32_t));
  v->draft_begins = take(a->batch * size);
  v->draft_positions = take(a->batch * v->drafts * size);
  if (a->pages) a->block_table = take(a->batch * a->pages * (int64_t)sizeof(int32_t));
}

/* Pages of the cache: those that the block table names. */
static int64_t count_pages(const struct attention *a) {
  int64_t most = -1;
  for (int64_t i = 0; i < a->batch * a->pages; ++i)
    if (a->block_table[i] > most) most = a->block_table[i];
  return most + 1;
}

static void attend(int with_tables) {
  long n[10];
  struct visible visible;
  struct attention a = {0};
  for (int i = 0; i < 10; ++i)
    if (scanf("%ld", n + i) != 1) exit(2);
  if (scanf("%f", &a.scale) != 1) exit(2);
  if (!with_tables) getchar();
  a.batch = n[0], a.queries = n[1], a.heads = n[2], a.kv_heads = n[3], a.head_dim = a.v_dim = n[4];
  a.tokens = n[5];
  a.q_type = (int32_t)n[6], a.kv_type = (int32_t)n[7], a.threads = (int32_t)n[8];
  a.way = (int32_t)n[9];
  if (with_tables) take_tables(&a, &visible), a.visible = &visible;
  const int64_t q_size = a.q_type ? 2 : 4, size = a.kv_type > 2 ? 1 : a.kv_type ? 2 : 4;
  a.q_head_stride = a.head_dim * q_size;
  a.q_query_stride = a.heads * a.q_head_stride;
  a.q_batch_stride = a.queries * a.q_query_stride;
  a.k_head_stride = a.v_head_stride = a.head_dim * size;
  a.k_token_stride = a.v_token_stride = a.kv_heads * a.k_head_stride;
  a.k_batch_stride = a.v_batch_stride = (a.block_table ? a.page_size : a.tokens) * a.k_token_stride;
  const int64_t rows = a.block_table ? count_pages(&a) : a.batch;
  a.q = take(a.batch * a.q_batch_stride);
  a.k = take(rows * a.k_batch_stride);
  a.v = take(rows * a.v_batch_stride);
  const int64_t bytes = a.batch * a.heads * a.queries * (a.head_dim + RECORD_NUMERATOR) * (int64_t)sizeof(float);
  a.records = malloc((size_t)bytes);
  a.workspace = aligned_alloc(64, (size_t)(attention_workspace(&a) + 63) / 64 * 64);
  if (partial_attention(&a)) exit(4);
  give(a.records, bytes);
}

static void merge(void) {
  long records, width;
  if (scanf("%ld %ld", &records, &width) != 2) exit(2);
  getchar();
  const int64_t bytes = records * width * (int64_t)sizeof(float);
  float *into = take(bytes), *other = take(bytes);
  merge_partials(into, other, records, width);
  give(into, bytes);
}

/* The sums of each record in one piece, as they are packed for one sum. */
static void rescale(void) {
  long records, width;
  if (scanf("%ld %ld", &records, &width) != 2) exit(2);
  getchar();
  float *from = take(records * width * (int64_t)sizeof(float)), *shared = take(records * (int64_t)sizeof(float));
  const int64_t bytes = records * (width - 1) * (int64_t)sizeof(float);
  float *sums = malloc((size_t)bytes);
  rescale_records(from, shared, sums, width - 1, sums + 1, width - 1, records, width);
  give(sums, bytes);
}

static void finish_all(void) {
  long rows, width;
  if (scanf("%ld %ld", &rows, &width) != 2) exit(2);
  getchar();
  const int64_t head_dim = width - RECORD_NUMERATOR;
  float *records = take(rows * width * (int64_t)sizeof(float));
  float *out = malloc((size_t)(rows * head_dim) * sizeof(float)), *lse = malloc((size_t)rows * sizeof(float));
  finish(records, out, lse, 1, rows, 1, width);
  give(out, rows * head_dim * (int64_t)sizeof(float));
  give(lse, rows * (int64_t)sizeof(float));
}

int main(void) {
  char verb[16];
  if (scanf("%15s", verb) != 1) return 2;
  if (!strcmp(verb, "attend")) attend(0);
  if (!strcmp(verb, "see")) attend(1);
  if (!strcmp(verb, "merge")) merge();
  if (!strcmp(verb, "rescale")) rescale();
  if (!strcmp(verb, "finish")) finish_all();
  return 0;
}
