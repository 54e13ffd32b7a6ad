"""Partials folded by NCCL's own all-reduce: the maximum first, then sums of what was rescaled to it.

NCCL knows maxima and sums but no operator of a user, so this is another algorithm than the merge: two
calls, or with ``calls=3`` the three of the paper (Tree Attention, arXiv 2408.04093, Algorithm 3: maximum,
denominator, numerator). NCCL decides in which order it adds: equal bits on all ranks are measured, not
promised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from treeattn.collectives.executors.captured import CapturedReducer
from treeattn.collectives.libraries.nccl import Communicator
from treeattn.collectives.memory import Stream
from treeattn.collectives.operator import Operator
from treeattn.errors import ScheduleError

__all__ = ["NcclAllreduce"]


class RescalingOperator(Operator, Protocol):
    """An operator that can put records on the scale of given maxima."""

    def planned_rescale(self, records: Any, maxima: Any, keep_maximum: bool) -> Callable[[], object]:
        """Multiply each of [records, width] by exp(its maximum - maxima[..]); leave that maximum or 0."""


class NcclAllreduce(CapturedReducer):
    """A reducer (see `executors.nccl.Reducer`) over NCCL's all-reduce. `calls`: 2, or the paper's 3.

    With two calls the records themselves are summed: all ranks but the first leave 0 for the maximum. With
    three, denominators and numerators travel apart, by way of arrays of their own.
    """

    def __init__(
        self,
        communicator: Communicator,
        operator: RescalingOperator,
        buffer: Any,
        stream: Stream,
        calls: int = 2,
    ) -> None:
        if calls not in (2, 3):
            raise ScheduleError(f"nccl_allreduce: calls={calls!r} must be 2 or 3")
        if not buffer.flags.c_contiguous or buffer.dtype != operator.dtype:
            raise ScheduleError(f"nccl_allreduce: the buffer must be C-contiguous {operator.dtype}")
        super().__init__("nccl_allreduce", communicator, stream)
        self._records = records = buffer.reshape(-1, operator.width)
        self._maxima = stream.empty(records.shape[:1], records.dtype)
        # Views of the records, and where they travel: sums of contiguous memory only.
        self._apart = [] if calls == 2 else [records[:, 1], records[:, 2:]]
        self._travelling = [stream.empty(part.shape, part.dtype) for part in self._apart]
        keeps = calls == 3 or communicator.rank == 0
        self._rescale = operator.planned_rescale(records, self._maxima, keeps)

    def _queue(self) -> None:
        copy, all_reduce = self._stream.copy, self._communicator.all_reduce
        copy(self._maxima, self._records[:, 0])
        all_reduce(self._maxima, "max")
        self._rescale()
        if not self._apart:
            all_reduce(self._records, "sum")
        for part, travelling in zip(self._apart, self._travelling, strict=True):
            copy(travelling, part)
            all_reduce(travelling, "sum")
            copy(part, travelling)
