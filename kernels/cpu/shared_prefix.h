/* Sequences whose first pages are the same: see shared_prefix.c. */
#ifndef TREEATTN_SHARED_PREFIX_H
#define TREEATTN_SHARED_PREFIX_H

#include "partial_attention.h"

/* Whether sequences may share pages that all of their queries see. */
static inline int may_share(const struct attention *a) {
  return a->block_table && a->batch > 1 && !a->visible && !a->reproducible;
}

/* attention_workspace() of shapes that may. */
int64_t sharing_workspace(const struct attention *a);

/* partial_attention(), which has looked at the lengths. Returns 0 where no pages are shared: nothing is done then. */
int attend_shared(const struct attention *a);

/* Of partial_attention.c: the same of sequences that share nothing, or are not asked whether they do. */
int64_t plain_workspace(const struct attention *a);
void attend_plainly(const struct attention *a);

#endif
