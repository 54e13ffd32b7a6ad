/* What is done to scores before the softmax where a query's visibility asks for it: a soft cap, ALiBi. */
#ifndef TREEATTN_ADJUST_SCORES_H
#define TREEATTN_ADJUST_SCORES_H

#include "hyperbolic_tangent.h"

enum { BLOCK = 16 };

/* For the rows and the tokens of one block. A row's ALiBi is slope * (position - base): the base lies among its own
 * tokens, since a distance to a far query would swallow a score's digits; write_records() makes good for it. */
struct adjustment {
  float softcap; /* 0: none */
  int alibi;
  const double *slope, *base; /* [rows] */
  double position[BLOCK];
};

static void adjust_scores(const struct adjustment *a, int rows, float (*scores)[BLOCK]) {
  for (int r = 0; r < rows; ++r) {
    if (a->softcap > 0)
      for (int i = 0; i < BLOCK; i += WIDTH) {
        const vector score = load(scores[r] + i);
        store(scores[r] + i, splat(a->softcap) * hyperbolic_tangent(score / splat(a->softcap)));
      }
    if (a->alibi)
      for (int i = 0; i < BLOCK; ++i) scores[r][i] += (float)(a->slope[r] * (a->position[i] - a->base[r]));
  }
}

#endif
