"""Three all-reductions with built-in operators: the paper's Algorithm 3 (arXiv 2408.04093).

Of n records of head_dim + 2 elements, n, n and n * head_dim elements are handed in: one after the other,
three times the latency of one.
"""

from __future__ import annotations

import functools

from treeattn.baselines.two_allreduce import RescaledSumOverMpi

plan = functools.partial(RescaledSumOverMpi, "three_allreduce", calls=3)
