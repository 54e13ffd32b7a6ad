"""Two all-reductions with built-in operators: one collective less than the paper's Algorithm 3.

Each record's denominator travels in front of its numerator: n, then n * (head_dim + 1) elements. Built-in
operators cannot do with less unless a maximum is known before.
"""

from __future__ import annotations

from treeattn.collectives.libraries.rescaled_sum import RescaledSumOverMpi
from treeattn.collectives.reducer import Reduction

__all__ = ["plan"]


def plan(reduction: Reduction) -> RescaledSumOverMpi:
    """Collective."""
    return RescaledSumOverMpi("two_allreduce", reduction, 2)
