"""One packed exchange of head slices: what serving engines do with sharded tokens (context parallel)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
from mpi4py import MPI

from treeattn.collectives.libraries.collective import CollectiveReducer
from treeattn.collectives.runtime.operator import Operator
from treeattn.collectives.runtime.reducer import ReductionSpec
from treeattn.partial import Array


class HeadAllToAll(CollectiveReducer):
    """One MPI_Alltoallv: rank r of p receives everyone's partials of its heads and merges them.

    The buffer is cut by heads: it views as [heads, group, operator.width]. Afterwards the slice
    heads*r//p to heads*(r+1)//p of rank r holds the result, merged in ascending order of ranks, and the rest
    what it held. The rank's own slice stays where it is: (p-1)/p of the buffer is handed to the library.
    """

    def __init__(self, reduction: ReductionSpec) -> None:
        super().__init__("head_all_to_all", reduction)
        comm, operator, buffer = reduction.comm, reduction.operator, reduction.buffer
        rank, size = comm.rank, comm.size
        heads = buffer.reshape(-1, reduction.granularity * operator.width)
        cuts = [len(heads) * r // size for r in range(size + 1)]
        own = heads[cuts[rank] : cuts[rank + 1]]
        self._arrived = np.empty((size, *own.shape), operator.dtype)
        # Counts and displacements in elements; nothing goes from a rank to itself.
        starts = [heads.shape[1] * cut for cut in cuts]
        leaving = [stop - start for start, stop in itertools.pairwise(starts)]
        coming = [own.size] * size
        leaving[rank] = coming[rank] = 0
        places = [own.size * r for r in range(size)]
        element = MPI._typedict[operator.dtype.char]
        self._exchange = (
            [buffer, leaving, starts[:-1], element],
            [self._arrived, coming, places, element],
        )
        self.sent = sum(leaving) * buffer.itemsize  # the slices of the other ranks
        self._merges = list(self._fold(operator, own)) if own.size else []

    def _fold(self, operator: Operator, own: Array) -> Iterator[Callable[[], object]]:
        """Merges in ascending order of ranks. They commute to the bit, so the sum may move into `own`."""
        values = [own if rank == self._comm.rank else value for rank, value in enumerate(self._arrived)]
        folded = values[0]
        for value in values[1:]:
            into, other = (own, folded) if value is own else (folded, value)
            yield operator.planned_merge(into.reshape(-1, operator.width), other.reshape(-1, operator.width))
            folded = into

    def _step(self) -> None:
        self._comm.Alltoallv(*self._exchange)
        self._rest()

    def _first(self) -> MPI.Request:
        return self._comm.Ialltoallv(*self._exchange)

    def _rest(self) -> None:
        for merge in self._merges:
            merge()


plan = HeadAllToAll
