/* Attention for many rows per KV head: see tiled_attention.c. partial_attention() comes here where it is faster. */
#ifndef TREEATTN_TILED_ATTENTION_H
#define TREEATTN_TILED_ATTENTION_H

#include "partial_attention.h"

/* Whether these shapes go this way. */
int suits_tiles(const struct attention *a);

/* As attention_workspace() and partial_attention(), which has looked at lengths and intervals. */
int64_t tiled_workspace(const struct attention *a);
void tiled_attention(const struct attention *a);

#endif
