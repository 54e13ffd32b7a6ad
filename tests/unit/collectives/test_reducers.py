"""The contract of reducers for executors whose ranks fit in one process."""

import os
import threading
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.settings import fuzzed
from tests.support.fake_nccl import Fabric, QueuedOperator
from tests.support.reducer_contract import OPERATOR, Ranks, ReducerContract
from treeattn.backends.cpu import compiled_kernels_problem
from treeattn.collectives.executors import compiled, nccl, slots
from treeattn.collectives.runtime import mpi_communicator
from treeattn.collectives.runtime.process import Process
from treeattn.collectives.runtime.reducer import ReductionSpec
from treeattn.mpi import communicators


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


class LocalRanks(Ranks):
    """Their steps go on in random order, or each in a thread of its own."""

    def __init__(self, reducers, buffers, seed):
        super().__init__(reducers, buffers)
        self._draw = np.random.default_rng(seed)

    def call(self):
        failed = []

        def run(reducer):
            try:
                reducer()
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=run, args=(reducer,)) for reducer in self.reducers.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed, failed

    def settle(self):
        left = list(self.reducers.values())
        while left:
            reducer = left[self._draw.integers(len(left))]
            if reducer.test():
                left.remove(reducer)


def plan_slots(case, buffers=None):
    """Real reducers of executor ``"slots"``, all on one node."""
    size = sum(map(len, case.nodes))
    node = tuple(range(size))
    arrays = buffers or [np.zeros((case.records, OPERATOR.width), np.float32) for _ in node]
    owner = Process.of(os.getpid())
    parts = {}

    def share(comm, ranks, size):
        for rank in ranks:
            parts.setdefault(rank, slots.SharedPart(np.zeros(size + 64, np.uint8), owner))
        return dict(parts)

    def duplicate(comm):
        return communicators.alone().dup()

    private = mock.patch.object(mpi_communicator, "duplicate", duplicate)
    with private, mock.patch.object(slots, "share", share):
        made = {}
        for rank in node:
            comm = SimpleNamespace(rank=rank, size=size)
            spec = ReductionSpec(comm, OPERATOR, arrays[rank], case.granularity)
            made[rank] = compiled.plan(spec, case.schedule, nodes=(node,), oversubscribed=True)
    return LocalRanks(made, dict(enumerate(arrays)), case.seed)


@pytest.mark.skipif(compiled_kernels_problem() is not None, reason="no C compiler")
class TestSlots(InProcess):
    def plan(self, case, buffers=None):
        return plan_slots(case, buffers)
