/* A whole step of a decoder as one call: attention to this process's tokens, their reduction over ranks, the result. */
#include "partial_attention.h"

struct decode_step {
  const struct attention *attention;
  int64_t (*reduce)(void *reduction, int64_t nanoseconds); /* run_step of step.c, whose results are 0 or more */
  void *reduction;
  int64_t nanoseconds;
  void (*finish)(const void *records, float *out, float *lse, int64_t batch, int64_t heads, int64_t queries,
                 int64_t width);
  const void *records;
  float *out, *lse;
  int64_t batch, heads, queries, width; /* of the records */
};

enum { REFUSED = -1 };

/* 0: all is done. REFUSED: lengths cannot be, and nothing was. Else what `reduce` says: the caller ends the reduction,
 * then finishes. */
int64_t decode_step(const struct decode_step *s) {
  if (partial_attention(s->attention)) return REFUSED;
  const int64_t result = s->reduce(s->reduction, s->nanoseconds);
  if (!result) s->finish(s->records, s->out, s->lse, s->batch, s->heads, s->queries, s->width);
  return result;
}
