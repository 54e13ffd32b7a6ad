/* What measuring chooses for a cache that is read in the order of memory, by type: float32, float16, bfloat16, e4m3fn,
 * e5m2. `treeattn roofline --tune` measures it anew; then these are given when the kernels are compiled.
 *
 * BLOCK_TOKENS: tokens of a block, keys first and then values. VALUES_AHEAD: how many bytes ahead values of one row for
 * each head are asked for (0: not). Measured on an AMD EPYC 9004 (Zen 4): elements of 16 bits and fewer make more sums
 * for each line of memory, which delays what is read next; then larger blocks change less often between keys and
 * values. */
#ifndef TREEATTN_TUNED_H
#define TREEATTN_TUNED_H

#include "simd.h"

#ifndef BLOCK_TOKENS
#if WIDTH == 16
#define BLOCK_TOKENS 128, 512, 512, 512, 512
#else
#define BLOCK_TOKENS 128, 256, 256, 256, 256
#endif
#endif

#ifndef VALUES_AHEAD
#if WIDTH == 16
#define VALUES_AHEAD 512, 8192, 8192, 8192, 8192
#else
#define VALUES_AHEAD 0, 8192, 8192, 8192, 8192
#endif
#endif

INLINE int block_tokens(enum element_type type) { return (const int[]){BLOCK_TOKENS}[type]; }
INLINE int values_ahead(enum element_type type) { return (const int[]){VALUES_AHEAD}[type]; }

#endif
