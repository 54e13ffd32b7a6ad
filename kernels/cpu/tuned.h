/* Numbers for a cache that is read in the order of memory, by type: float32, float16, bfloat16, e4m3fn, e5m2.
 *
 * block_tokens: tokens of a block, keys first and then values. values_ahead: how many bytes ahead values of one row for
 * each head are asked for (0: not). Measured on an AMD EPYC 9004 (Zen 4): elements of 16 bits and fewer make more sums
 * for each line of memory, which delays what is read next; then larger blocks change less often between keys and
 * values. */
#ifndef TREEATTN_TUNED_H
#define TREEATTN_TUNED_H

#include "simd.h"

INLINE int block_tokens(enum element_type type) { return type == FLOAT32 ? 128 : WIDTH == 16 ? 512 : 256; }
INLINE int values_ahead(enum element_type type) { return type != FLOAT32 ? 8192 : WIDTH == 16 ? 512 : 0; }

#endif
