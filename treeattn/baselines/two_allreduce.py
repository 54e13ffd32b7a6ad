"""Two all-reductions with built-in operators: one collective less than the paper's Algorithm 3.

Each record's denominator travels in front of its numerator: n, then n * (head_dim + 1) elements. Built-in
operators cannot do with less unless a maximum is known before.
"""

from __future__ import annotations

import functools

from treeattn.collectives.libraries.rescaled_sum import RescaledSumOverMpi

plan = functools.partial(RescaledSumOverMpi, "two_allreduce", calls=2)
