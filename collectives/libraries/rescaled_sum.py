"""Records folded by built-in all-reductions: the maximum first, then sums of what was rescaled to it.

Libraries know maxima and sums. So the maxima are reduced; each rank puts its records on the scale of the
common maximum; then denominators and numerators merge by adding: in one all-reduction, or apart, as in
Tree Attention (arXiv 2408.04093, Algorithm 3; its ranks hold lse and out in place of maximum, denominator and
numerator: collectives and bytes are the same). One algorithm over two wires: `nccl_allreduce`, and MPI in
`treeattn.baselines`. The library chooses the order of the sums: equal bits on all ranks are measured, not
promised.
"""

from __future__ import annotations

from treeattn.collectives.runtime.memory import Array, Memory
from treeattn.collectives.runtime.operator import RescalingOperator
from treeattn.collectives.runtime.reducer import ReductionSpec


class RescaledArrays:
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
