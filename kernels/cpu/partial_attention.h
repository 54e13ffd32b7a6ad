/* What treeattn/backends/cpu.py passes to the attention kernel. Strides are in bytes. */
#ifndef TREEATTN_PARTIAL_ATTENTION_H
#define TREEATTN_PARTIAL_ATTENTION_H

#include "records.h"
#include "thread_pool.h"
#include "visible.h"

/* What the bits of a record depend on: order and processor too; on the set of tokens that a query sees alone; also on
 * which 32 tokens, from a multiple of 32 on, are a block. */
enum reproducible { NOT_REPRODUCIBLE = 0, OF_TOKENS = 1, OF_BLOCKS = 2 };

struct attention {
  const char *q;          /* [batch, queries, heads, head_dim] */
  const char *k;          /* [batch, tokens, kv_heads, head_dim], or [any, page_size, ..] with a block table */
  const char *v;          /* [batch, tokens, kv_heads, v_dim], or as k; it may be the first channels of k */
  float *records;         /* [batch, heads, queries, v_dim + 2], written; where reproducible: of bins.h, int64_t */
  const int64_t *lengths; /* [batch]: valid tokens, or NULL: all are */
  void *workspace;        /* attention_workspace() bytes, aligned to 64 */
  int64_t batch, queries, heads, kv_heads, head_dim, v_dim, tokens;
  int64_t q_batch_stride, q_query_stride, q_head_stride;
  int64_t k_batch_stride, k_token_stride, k_head_stride;
  int64_t v_batch_stride, v_token_stride, v_head_stride;
  float scale;
  int32_t q_type, kv_type;        /* enum element_type */
  int32_t threads, way;           /* enum way of attention_state.h */
  int32_t reproducible;           /* enum reproducible */
  const struct visible *visible;  /* or NULL: every query sees the first lengths[b] tokens */
  const float *k_scale, *v_scale; /* [kv_heads]: what elements of k, v are multiplied with; NULL: 1 */
  const int32_t *block_table;     /* [batch, pages]: where a sequence's pages lie; NULL: its tokens lie in a row */
  int64_t pages, page_size;       /* tokens is pages * page_size, and the batch strides are those of pages */
};

static inline int64_t quotient_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int threads_of(const struct attention *a) { return (int)least(most(a->threads, 1), MAX_THREADS); }
static inline int64_t rows_per_kv_head(const struct attention *a) { return a->heads / a->kv_heads * a->queries; }
static inline int64_t record_count(const struct attention *a) { return a->batch * a->heads * a->queries; }
static inline int64_t record_width(const struct attention *a) { return a->v_dim + RECORD_NUMERATOR; }

/* Bytes of workspace for these shapes; pointers and strides are not looked at. */
int64_t attention_workspace(const struct attention *a);

/* Attention of every query head over the first lengths[b] tokens, or what it may see, where lengths are not looked at.
 * Page numbers are not looked at, but for those of tokens that some query sees, which have to be right.
 * Returns 0, or b + 1 for the first b of which a length or a visible token is not in 0..tokens: nothing is written
 * then. */
int64_t partial_attention(const struct attention *a);

#endif
