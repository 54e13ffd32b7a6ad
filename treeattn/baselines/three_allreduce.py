"""Three all-reductions with built-in operators: the paper's Algorithm 3 (arXiv 2408.04093)."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from treeattn.backends.cpu.rescale import planned_rescale
from treeattn.baselines.sent import Sent
from treeattn.collectives.libraries.collective import CollectiveReducer
from treeattn.collectives.operator import Operator

__all__ = ["ThreeAllreduce"]


class ThreeAllreduce(CollectiveReducer):
    """All-reductions of the maxima (MAX), then of denominators and of numerators (SUM).

    Of n records of head_dim + 2 elements, n, n and n * head_dim elements are handed in: one after the other,
    three times the latency of one. (The paper's ranks hold lse and out in place of max, denominator and
    numerator; collectives and bytes are the same.) After the first, each rank rescales its records to the
    common maximum. float32 and float64. The library chooses the order of the sums: equal bits on all ranks
    are measured, not promised.
    """

    name = "three_allreduce"

    def __init__(self, comm: MPI.Intracomm, operator: Operator, buffer: Any) -> None:
        super().__init__(comm, operator, buffer)
        count, width = self._records.shape
        self._maxima = np.empty(count, operator.dtype)
        self._reserve(count, width - 2, operator.dtype)
        self._rescale = planned_rescale(self._records, self._maxima, self._denominators, self._numerators)

    def _reserve(self, count: int, head_dim: int, dtype: Any) -> None:
        self._denominators = np.empty(count, dtype)
        self._numerators = np.empty((count, head_dim), dtype)

    @property
    def sent(self) -> Sent:
        """Handed to the library: every element of every record once."""
        return Sent(None, self._records.nbytes)

    def _take_maxima(self) -> None:
        # MAX of NaN is not defined: it travels as +inf, which finishes as NaN too.
        np.fmin(self._records[:, 0], np.inf, out=self._maxima)

    def _step(self) -> None:
        self._take_maxima()
        self._comm.Allreduce(MPI.IN_PLACE, self._maxima, MPI.MAX)
        self._complete()

    def _begin(self) -> MPI.Request:
        self._take_maxima()
        return self._comm.Iallreduce(MPI.IN_PLACE, self._maxima, MPI.MAX)

    def _complete(self) -> None:
        self._rescale()
        self._sum()
        self._records[:, 0] = self._maxima
        self._records[:, 1] = self._denominators
        self._records[:, 2:] = self._numerators

    def _sum(self) -> None:
        self._comm.Allreduce(MPI.IN_PLACE, self._denominators, MPI.SUM)
        self._comm.Allreduce(MPI.IN_PLACE, self._numerators, MPI.SUM)
