"""Partials folded by NCCL's own all-reduce, which knows maxima and sums but no operator of a user.

So this is another algorithm than the merge: `rescaled_sum`, in two calls or in the paper's three.
"""

from __future__ import annotations

from treeattn.collectives.libraries.rescaled_sum import RescaledSumOverNccl
from treeattn.collectives.reducer import Reduction

__all__ = ["plan"]


def plan(reduction: Reduction, calls: str = "2") -> RescaledSumOverNccl:
    """Collective; `reduction` is over a communicator of NCCL, which the reducer then owns."""
    return RescaledSumOverNccl("nccl_allreduce", reduction, int(calls))
