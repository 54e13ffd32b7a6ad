"""The contract of reducers for executors whose ranks fit in one process."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.settings import fuzzed
from tests.support.fake_nccl import Fabric, QueuedOperator
from tests.support.local_ranks import plan_slots
from tests.support.reducer_contract import OPERATOR, Ranks, ReducerContract
from treeattn.backends.cpu import compiled_kernels_problem
from treeattn.collectives.executors import nccl
from treeattn.collectives.runtime.reducer import ReductionSpec


class InProcess(ReducerContract):
    sizes = st.integers(1, 7)

    @pytest.fixture(autouse=True, params=[1, 3, 6], ids="{} ranks".format)
    def _size(self, request):
        self.size = request.param

    def for_each(self, strategy, check):
        if self.size == 1:  # other sizes are drawn
            fuzzed(100)(given(strategy)(lambda case: check(case)))()


class OverNccl(Ranks):
    """What is queued to all streams runs at the end, in random order."""

    def __init__(self, reducers, buffers, fabric):
        super().__init__(reducers, buffers)
        self._fabric = fabric

    def call(self):
        super().call()
        self._fabric.run()

    def settle(self):
        self._fabric.run()
        super().settle()

    def close(self):
        for stream in self._fabric.streams:
            stream.done()
        super().close()


class TestNccl(InProcess):
    """The first step as it is, the second captured, the others launched again."""

    def plan(self, case, buffers=None):
        fabric = Fabric(sum(map(len, case.nodes)), case.seed)
        arrays = buffers or [np.zeros((case.records, OPERATOR.width), np.float32) for _ in fabric.streams]
        made = {}
        for rank, (stream, array) in enumerate(zip(fabric.streams, arrays, strict=True)):
            spec = ReductionSpec(stream, QueuedOperator(OPERATOR, stream), array, case.granularity, stream)
            made[rank] = nccl.plan(spec, case.schedule)
        return OverNccl(made, dict(enumerate(arrays)), fabric)


@pytest.mark.skipif(compiled_kernels_problem() is not None, reason="no C compiler")
class TestSlots(InProcess):
    def plan(self, case, buffers=None):
        return plan_slots(case, buffers)
