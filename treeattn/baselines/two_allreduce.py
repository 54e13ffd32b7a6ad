"""Two all-reductions with built-in operators: one collective less than the paper's Algorithm 3.

Each record's denominator travels in front of its numerator: n, then n * (head_dim + 1) elements. Built-in
operators cannot do with less unless a maximum is known before.
"""

from __future__ import annotations

import functools

from mpi4py import MPI

from treeattn.collectives.libraries.collective import CollectiveReducer
from treeattn.collectives.libraries.rescaled_sum import RescaledArrays
from treeattn.collectives.runtime.reducer import ReductionSpec


class RescaledSumOverMpi(CollectiveReducer):
    """MPI_Allreduce with MAX, then with SUM. `calls`: 2 or 3; float32 and float64."""

    def __init__(self, name: str, reduction: ReductionSpec, calls: int) -> None:
        super().__init__(name, reduction)
        self._arrays = RescaledArrays(self._records, reduction, calls)
        self.sent = self._records.nbytes  # every element of every record once

    def _step(self) -> None:
        self._arrays.take_maxima()
        self._comm.Allreduce(MPI.IN_PLACE, self._arrays.maxima, MPI.MAX)
        self._rest()

    def _first(self) -> MPI.Request:
        self._arrays.take_maxima()
        return self._comm.Iallreduce(MPI.IN_PLACE, self._arrays.maxima, MPI.MAX)

    def _rest(self) -> None:
        self._arrays.rescale()
        for array in self._arrays.sums:
            self._comm.Allreduce(MPI.IN_PLACE, array, MPI.SUM)
        self._arrays.put_back()


plan = functools.partial(RescaledSumOverMpi, "two_allreduce", calls=2)
