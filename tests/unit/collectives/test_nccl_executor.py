"""Reducers over NCCL: their graphs, their end, and waits that end."""

import threading

import numpy as np
import pytest

from tests.support.fake_nccl import Fabric, QueuedOperator
from treeattn.backends.cpu import MergeOperator
from treeattn.collectives import build
from treeattn.collectives.executors import nccl
from treeattn.collectives.runtime import cuda_graph
from treeattn.collectives.runtime.reducer import ReductionSpec
from treeattn.errors import StateError, TransportError

OPERATOR = MergeOperator(8)


def reduction(stream, buffer, operator=None):
    return ReductionSpec(stream, operator or QueuedOperator(OPERATOR, stream), buffer, 1, stream)


@pytest.mark.parametrize("scheme", ["all_gather_merge", "recursive_multiplying:factors=7"])
def test_arrivals_of_a_round_fold_in_at_most_two_launches(scheme):
    for rank, stream in enumerate(Fabric(7).streams):
        operator = QueuedOperator(OPERATOR, stream)
        nccl.plan(reduction(stream, np.zeros((7, 10), np.float32), operator), build(scheme, 7))
        assert operator.planned == (1 if rank < 2 else 2)


def test_a_capture_before_the_first_step_is_refused():
    stream = Fabric(2).streams[0]
    with nccl.plan(reduction(stream, np.zeros((2, 10), np.float32)), build("chain", 2)) as reducer:
        with pytest.raises(StateError, match="run one before capturing one"):
            stream.capture(reducer)
        stream._recorded = None
        reducer()  # nothing has begun: the advice can be followed
        stream.queued.clear()
        stream.waited = True


@pytest.mark.parametrize("lost", [False, True], ids=["body", "launch"])
def test_the_graph_goes_before_a_communicator_that_is_aborted(lost):
    """An error in the body, or in a launch, whose traceback is alive meanwhile."""
    stream = Fabric(2).streams[0]
    buffer = np.zeros((2, 10), np.float32)

    def fail():
        with nccl.plan(reduction(stream, buffer), build("chain", 2)) as reducer:
            reducer()
            reducer()
            stream.lost = lost
            reducer()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert stream.closed == "aborted"
    assert stream.graph_launches == (1 if lost else 2)


@pytest.fixture
def hurried(monkeypatch):
    monkeypatch.setenv("TREEATTN_TIMEOUT", "0.05")
    monkeypatch.setattr(cuda_graph, "_ABORT_SECONDS", 0.05)


def hanging(steps=1):
    """A reducer of rank 0, whose peers never come, and its stream."""
    stream = Fabric(3).streams[0]
    reducer = nccl.plan(reduction(stream, np.zeros((3, 10), np.float32)), build("recursive_multiplying", 3))
    for _ in range(steps):
        reducer()
    return reducer, stream


@pytest.mark.parametrize("steps", [1, 2])
def test_a_wait_for_a_step_that_hangs_ends(hurried, steps):
    """As it is, and as a graph: which must go before the communicator is aborted."""
    reducer, stream = hanging(steps)
    words = r"recursive_multiplying over NCCL, queued to a GPU: 0\.05 s without rank 1 and 2, .*TREEATTN_T"
    with pytest.raises(TransportError, match=words):
        reducer.synchronize()
    assert stream.closed == "aborted"
    with pytest.raises(StateError, match="a step on a reducer that is closed"):
        reducer()
    reducer.close()  # nothing is left to do


def test_closing_over_a_step_that_hangs_ends(hurried, monkeypatch):
    reducer, stream = hanging()
    monkeypatch.setattr(stream, "synchronize_all", threading.Event().wait)
    with pytest.raises(TransportError, match="0.05 s without rank 1 and 2"):
        reducer.close()
    assert stream.closed == "aborted"
    assert reducer in cuda_graph._left_behind


def test_a_graph_of_the_callers_that_outlives_its_reducer_is_named(hurried, monkeypatch):
    """NCCL's end waits for it: here as long as an event that nobody sets."""
    stream = Fabric(1).streams[0]
    reducer = nccl.plan(reduction(stream, np.zeros((2, 10), np.float32)), build("chain", 1))
    monkeypatch.setattr(stream, "close", threading.Event().wait)
    with pytest.raises(TransportError, match="drop CUDA graphs of your own that hold a step before close"):
        reducer.close()
