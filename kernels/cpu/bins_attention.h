/* Attention into records of bins.h, as partial_attention() calls it. */
#ifndef TREEATTN_BINS_ATTENTION_H
#define TREEATTN_BINS_ATTENTION_H

#include "partial_attention.h"

/* Bytes of workspace. */
int64_t bins_workspace(const struct attention *a);

/* What partial_attention() says, where `records` are those of bins.h. */
void attend_bins(const struct attention *a);

#endif
