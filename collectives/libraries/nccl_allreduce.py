"""Partials folded by NCCL's own all-reduce, which knows maxima and sums but no operator of a user.

So this is another algorithm than the merge: `rescaled_sum`, in two calls or in the paper's three.
"""

from __future__ import annotations

from treeattn.collectives.libraries.rescaled_sum import RescaledArrays
from treeattn.collectives.runtime import nccl
from treeattn.collectives.runtime.cuda_graph import CudaGraphReducer
from treeattn.collectives.runtime.reducer import ReductionSpec


def plan(spec: ReductionSpec, calls: str = "2") -> CudaGraphReducer:
    """NCCL's all-reduce with max, then with sum, queued to a GPU's stream; calls: 2 or 3; float32.

    spec: over a communicator of NCCL, which the reducer then owns. With 2 calls the records travel whole, in
    place: a copy less costs more than an element for each record.
    """
    arrays = RescaledArrays(spec.records("nccl_allreduce"), spec, int(calls), in_place=True)
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
