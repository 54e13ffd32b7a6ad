"""Reducers in one process: the states of every one, and the contract of executors whose ranks fit."""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partialmethod
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
from treeattn.collectives.runtime.reducer import Reducer, ReductionSpec
from treeattn.errors import StateError
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
        with ThreadPoolExecutor(len(self.reducers)) as threads:
            for step in [threads.submit(reducer) for reducer in self.reducers.values()]:
                step.result()

    def settle(self):
        left = list(self.reducers.values())
        while left:
            reducer = left[self._draw.integers(len(left))]
            if reducer.test():
                left.remove(reducer)


@pytest.mark.skipif(compiled_kernels_problem() is not None, reason="no C compiler")
class TestSlots(InProcess):
    def plan(self, case, buffers=None):
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

        private = mock.patch.object(
            mpi_communicator, "duplicate", side_effect=lambda comm: communicators.alone().dup()
        )
        with private, mock.patch.object(slots, "share", share):
            made = {}
            for rank in node:
                comm = SimpleNamespace(rank=rank, size=size)
                spec = ReductionSpec(comm, OPERATOR, arrays[rank], case.granularity)
                made[rank] = compiled.plan(spec, case.schedule, nodes=(node,), oversubscribed=True)
        return LocalRanks(made, dict(enumerate(arrays)), case.seed)


class Logged(Reducer):
    """Writes down what it is asked for; `fails` names what raises."""

    def __init__(self, fails=""):
        super().__init__("logged")
        self.log, self.fails = [], fails

    def _part(self, name):
        self.log.append(name)
        if name == self.fails:
            raise KeyError(name)

    def _advance(self):
        self._part("advance")
        return False

    _begin, _complete = partialmethod(_part, "begin"), partialmethod(_part, "complete")
    _release, _abandon = partialmethod(_part, "release"), partialmethod(_part, "abandon")


def test_closing_ends_a_step_in_flight_once():
    """What may follow what is of the contract of all reducers."""
    reducer = Logged()
    reducer()
    assert (reducer.blocking, reducer.in_flight) == (0, False)
    reducer.start()
    assert (reducer.blocking, reducer.in_flight, reducer.test()) == (0, True, False)
    reducer.close()
    reducer.close()
    assert reducer.log == ["begin", "complete", "begin", "advance", "complete", "release"]


@pytest.mark.parametrize(
    ("fails", "calls"),
    [
        ("begin", ["__call__"]),
        ("begin", ["start"]),
        ("complete", ["__call__"]),
        ("complete", ["start", "wait"]),
        ("advance", ["start", "test"]),
    ],
)
def test_a_step_that_fails_is_never_finished_nor_followed(fails, calls):
    """Others may have gone on: what is left is the end of this rank alone."""
    reducer, *before, last = Logged(fails), *calls
    for call in before:
        getattr(reducer, call)()
    with pytest.raises(KeyError):
        getattr(reducer, last)()
    assert (reducer.blocking, reducer.in_flight) == (0, True), "it waits for no one"
    with pytest.raises(StateError, match="failed"):
        reducer()
    for call in (reducer.wait, reducer.test):
        with pytest.raises(StateError, match=r"\w+\(\) without start\(\)"):
            call()
    reducer.close()
    assert reducer.log[-1] == "abandon"
    assert "release" not in reducer.log


def test_an_error_outside_of_a_step_leaves_without_the_others():
    reducer = Logged()
    reducer()
    reducer.__exit__(ZeroDivisionError)
    assert reducer.log == ["begin", "complete", "abandon"]


def test_what_a_fork_inherits_is_disowned():
    reducer = Logged()
    reducer.start()
    if (child := os.fork()) == 0:
        try:
            reducer.wait()
        except StateError as error:
            os._exit(0 if "another process's" in str(error) and not reducer.in_flight else 2)
        os._exit(3)
    assert os.waitpid(child, 0)[1] == 0
    reducer.close()
    assert reducer.log == ["begin", "complete", "release"]


def test_other_work_in_place_of_a_step():
    reducer = Logged()
    step = reducer.step_by(lambda: reducer.log.append("work"))
    step()
    step()
    assert (reducer.log, reducer.in_flight) == (["work", "work"], False)
    reducer.start()
    with pytest.raises(StateError, match="already running"):
        step()
