/* What a piece of work is where the cache is read in the order of memory, and how scores become weights then. */
#ifndef TREEATTN_IN_ORDER_H
#define TREEATTN_IN_ORDER_H

#include "attention_state.h"
#include "hyperbolic_tangent.h"

/* Neighbouring KV heads with the rows of each, and the tokens of a piece. */
struct in_order {
  int heads, rows;
  int streams;                    /* places that are read in turn, where there is one row for each head */
  int64_t ahead;                  /* bytes from what is read there to what is asked for; 0: nothing is */
  int listed;                     /* whether tokens do not lie each `k_token` behind the one before */
  int64_t tokens, block;          /* block: tokens of one, at most */
  int64_t elements, floats;       /* of a key or value; of a row of q, whole units */
  const char *k, *v;              /* of the first head */
  int64_t k_head, v_head;         /* bytes from a head to the next, */
  int64_t k_token, v_token;       /* and from a token to the next in its page */
  const int64_t *k_rows, *v_rows; /* [tokens]: how far from there each token's row is */
  const float *q;                 /* [heads][rows][floats], as all that follows in a state */
  const uint16_t *q_bits;         /* the same as it came, in bfloat16, which is then to be scaled; or NULL */
  float scale;
  float *numerator, *sum; /* sum: of each stream */
  float *maximum, *denominator, *factor;
  float *scores, *lanes;                 /* scores[token][head][row] */
  float softcap;                         /* 0: none */
  const double *position, *slope, *base; /* of tokens; of rows; slope is NULL without ALiBi */
};

/* A soft cap, then ALiBi, which is slope * (position - base) here: the base lies among a row's own tokens, since a
 * distance to a far query would swallow a score's digits; write_records() makes good for it. */
static void adjust_in_order(const struct in_order *o, int64_t token, int tokens) {
  const int rows = o->heads * o->rows;
  for (int i = 0; o->softcap > 0 && i < tokens * rows; i += WIDTH) {
    const vector score = load(o->scores + i);
    store(o->scores + i, splat(o->softcap) * hyperbolic_tangent(score / splat(o->softcap)));
  }
  for (int t = 0; o->slope && t < tokens; ++t)
    for (int r = 0; r < rows; ++r)
      o->scores[t * rows + r] += (float)(o->slope[r] * (o->position[token + t] - o->base[r]));
}

/* Scores to weights, in place; sums by token modulo WIDTH go to the denominators. */
static __attribute__((noinline)) void weigh_in_order(const struct in_order *o, int tokens) {
  const int rows = o->heads * o->rows, lanes = rows * WIDTH, whole = (tokens + WIDTH - 1) / WIDTH * lanes;
  for (int i = tokens * rows; i < whole; ++i) o->scores[i] = -INFINITY;
  for (int l = 0; l < lanes; l += WIDTH) {
    vector highest = load(o->scores + l);
    for (int i = l + lanes; i < whole; i += lanes) highest = larger(load(o->scores + i), highest);
    store(o->lanes + l, highest);
  }
  for (int r = 0; r < rows; ++r) {
    float highest = o->maximum[r];
    for (int i = r; i < lanes; i += rows) highest = o->lanes[i] > highest ? o->lanes[i] : highest;
    o->factor[r] = o->maximum[r] == highest ? 1.0f : exponential(o->maximum[r] - highest);
    o->maximum[r] = highest;
    for (int i = r; i < lanes; i += rows) o->lanes[i] = highest == -INFINITY ? 0.0f : highest;
  }
  for (int l = 0; l < lanes; l += WIDTH) {
    const vector base = load(o->lanes + l);
    vector sum = splat(0.0f);
    for (int i = l; i < whole; i += lanes) {
      const vector weight = exponential_lanes(load(o->scores + i) - base);
      store(o->scores + i, weight);
      sum += weight;
    }
    store(o->lanes + l, sum);
  }
  for (int r = 0; r < rows; ++r)
    for (int i = 0; i < WIDTH; ++i) {
      float *to = o->denominator + r * WIDTH + i;
      *to = *to * o->factor[r] + o->lanes[i * rows + r];
    }
}

#endif
