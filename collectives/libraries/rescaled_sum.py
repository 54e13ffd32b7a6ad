"""Records folded by built-in all-reductions: the maximum first, then sums of what was rescaled to it.

Libraries know maxima and sums. So the maxima are reduced; each rank puts its records on the scale of the
common maximum; then denominators and numerators merge by adding: in one all-reduction, or apart, as in
Tree Attention (arXiv 2408.04093, Algorithm 3; its ranks hold lse and out in place of maximum, denominator and
numerator: collectives and bytes are the same). One algorithm over two wires. The library chooses the order of
the sums: equal bits on all ranks are measured, not promised.
"""

from __future__ import annotations

from mpi4py import MPI

from treeattn.collectives.libraries.collective import CollectiveReducer
from treeattn.collectives.runtime import nccl
from treeattn.collectives.runtime.cuda_graph import CudaGraphReducer
from treeattn.collectives.runtime.memory import Array, Memory
from treeattn.collectives.runtime.operator import RescalingOperator
from treeattn.collectives.runtime.reducer import ReductionSpec


class _Arrays:
    """What travels: `maxima`, then each of `sums`; `take_maxima` and `rescale` fill them. Planned once.

    calls: all-reductions in a step. With 3, denominators and numerators are sums of their own. With 2 they
    are one: packed, or `in_place` the whole records, whose maxima are overwritten afterwards.
    """

    def __init__(self, records: Array, reduction: ReductionSpec, calls: int, in_place: bool = False) -> None:
        operator: RescalingOperator = reduction.operator
        memory: Memory = reduction.memory
        empty = memory.empty
        self.own = operator.columns(records)
        count, width = self.own.numerator.shape
        self.maxima = empty((count,), operator.dtype)
        if calls == 3:
            self.sums = [empty((count,), operator.dtype), empty((count, width), operator.dtype)]
            self._folded = tuple(self.sums)
        elif in_place:
            self.sums, self._folded = [records], self.own[1:]
        else:
            self.sums = [empty((count, 1 + width), operator.dtype)]
            self._folded = self.sums[0][:, 0], self.sums[0][:, 1:]
        self.take_maxima = operator.planned_maxima(records, self.maxima)
        self.rescale = operator.planned_rescale(records, self.maxima, *self._folded)
        self._copy = memory.copy
        self._in_place = in_place and calls == 2

    def put_back(self) -> None:
        """The folded parts into the records."""
        self._copy(self.own.maximum, self.maxima)
        if not self._in_place:
            self._copy(self.own.denominator, self._folded[0])
            self._copy(self.own.numerator, self._folded[1])


class RescaledSumOverMpi(CollectiveReducer):
    """MPI_Allreduce with MAX, then with SUM. `calls`: 2 or 3; float32 and float64."""

    def __init__(self, name: str, reduction: ReductionSpec, calls: int) -> None:
        super().__init__(name, reduction)
        self._arrays = _Arrays(self._records, reduction, calls)
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


def over_nccl(spec: ReductionSpec, calls: str = "2") -> CudaGraphReducer:
    """NCCL's all-reduce with max, then with sum, queued to a GPU's stream; calls: 2 or 3; float32.

    spec: over a communicator of NCCL, which the reducer then owns. With 2 calls the records travel whole, in
    place: a copy less costs more than an element for each record.
    """
    arrays = _Arrays(spec.records("nccl_allreduce"), spec, int(calls), in_place=True)
    communicator: nccl.NcclCommunicator = spec.comm
    all_reduce = communicator.all_reduce

    def queue() -> None:
        arrays.take_maxima()
        all_reduce(arrays.maxima, "max")
        arrays.rescale()
        for array in arrays.sums:
            all_reduce(array, "sum")
        arrays.put_back()

    return CudaGraphReducer("nccl_allreduce", communicator, spec.memory, queue)
