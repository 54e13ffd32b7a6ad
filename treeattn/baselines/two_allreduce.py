"""Two all-reductions with built-in operators: one collective less than the paper's Algorithm 3."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from treeattn.baselines.three_allreduce import ThreeAllreduce

__all__ = ["TwoAllreduce"]


class TwoAllreduce(ThreeAllreduce):
    """An all-reduction of the maxima (MAX), then one of denominators and numerators together (SUM).

    As `ThreeAllreduce`, but each record's denominator travels in front of its numerator: n, then
    n * (head_dim + 1) elements. Built-in operators cannot do with less unless a maximum is known before.
    """

    name = "two_allreduce"

    def _reserve(self, count: int, head_dim: int, dtype: Any) -> None:
        self._sums = np.empty((count, 1 + head_dim), dtype)
        self._denominators, self._numerators = self._sums[:, 0], self._sums[:, 1:]

    def _sum(self) -> None:
        self._comm.Allreduce(MPI.IN_PLACE, self._sums, MPI.SUM)
