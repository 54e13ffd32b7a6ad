"""What is asked of NCCL, with a module in its place that writes it down; its reducers, and waits that end."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.fake_nccl import Fabric, QueuedOperator
from tests.unit.backends.cupy_signatures import MadeUpCupy
from treeattn.backends.cpu import MergeOperator
from treeattn.collectives import build
from treeattn.collectives.executors import nccl as over_nccl
from treeattn.collectives.runtime import cuda_graph, nccl
from treeattn.collectives.runtime.reducer import ReductionSpec
from treeattn.errors import StateError, TransportError


class NcclError(RuntimeError):
    """As in cupy.cuda.nccl."""


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    for cached in (nccl._library, nccl.problem):
        cached.cache_clear()
    yield
    for cached in (nccl._library, nccl.problem):
        cached.cache_clear()


def modules(**changes: Any) -> dict[str, Any]:
    """A CuPy with NCCL; what is asked of `cupy.cuda.nccl` and has an answer of its own, by the name there."""
    cupy = MadeUpCupy()
    answers = {"available": True, "NCCL_FLOAT32": 7, "NCCL_SUM": 0, "NCCL_MAX": 2, "get_version": 23007,
               "get_unique_id": bytes(128)} | changes  # fmt: skip
    cupy.answers |= {f"cuda.nccl.{name}": answer for name, answer in answers.items()}
    return {"cupy": cupy, "cupy.cuda": cupy.cuda, "cupy.cuda.nccl": cupy.cuda.nccl}


def use(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> list[Any]:
    """The list of what is called."""
    made = modules(**changes)
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    calls: list[Any] = made["cupy"].log
    return calls


ONE: Any = SimpleNamespace(rank=0, size=1, bcast=lambda value, root: value)
STREAM: Any = SimpleNamespace(stream=99, address=lambda array: array.ctypes.data)


def test_arrays_become_addresses_counts_and_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = use(monkeypatch)
    array = np.zeros((2, 3), np.float32)
    at = array.ctypes.data
    assert nccl.problem() is None
    communicator = nccl.connect(ONE, STREAM)
    communicator.exchange([(array, 2)], [(array, 1)])
    communicator.all_reduce(array, "max")
    communicator.all_reduce(array, "sum")
    communicator.close()
    communicator.abort()
    of = "cuda.nccl.NcclCommunicator"
    assert [
        call for call in calls if call[0] not in ("cuda.nccl.get_unique_id", "cuda.nccl.get_version")
    ] == [
        (of, 1, bytes(128), 0),
        ("cuda.nccl.groupStart",),
        (f"{of}.recv", at, 6, 7, 2, 99),
        (f"{of}.send", at, 6, 7, 1, 99),
        ("cuda.nccl.groupEnd",),
        (f"{of}.allReduce", at, at, 6, 7, 2, 99),
        (f"{of}.allReduce", at, at, 6, 7, 0, 99),
        (f"{of}.destroy",),
        (f"{of}.abort",),
    ]


def test_a_cupy_that_does_not_load_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    assert "does not load" in str(nccl.problem())


def test_a_cupy_without_nccl_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, available=False)
    assert "no NCCL: install treeattn[nccl12]" in str(nccl.problem())


@pytest.mark.parametrize(
    ("when", "said"),
    [
        ("get_unique_id", "does not start"),
        ("NcclCommunicator", "cannot connect 1 ranks"),
        ("NcclCommunicator.check_async_error", "broke off"),
    ],
)
def test_a_refusal_says_where_to_learn_more(monkeypatch: pytest.MonkeyPatch, when: str, said: str) -> None:
    use(monkeypatch, **{when: NcclError("NCCL_ERROR_SYSTEM_ERROR")})
    with pytest.raises(TransportError, match=f"{said}: NCCL_ERROR_SYSTEM_ERROR.*NCCL_DEBUG"):
        nccl.connect(ONE, STREAM).check()


@pytest.mark.parametrize(
    ("version", "variable", "problem"),
    [
        (23000, "1", None),
        (23203, "1", None),
        (23007, None, "only where NCCL_MULTI_RANK_GPU_ENABLE=1 is set for every rank"),
        (23007, "0", "only where NCCL_MULTI_RANK_GPU_ENABLE=1 is set for every rank"),
        (22809, "1", r"NCCL 2\.28 needs one for each: install NCCL 2\.30 or newer and set NCCL_MULTI_"),
        (2804, "1", "needs one for each"),  # as versions before 2.9 are written
    ],
)
def test_whether_ranks_may_share_a_gpu(
    monkeypatch: pytest.MonkeyPatch, version: int, variable: str | None, problem: str | None
) -> None:
    use(monkeypatch, get_version=version)
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    if variable is not None:
        monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", variable)
    found = nccl.sharing_problem()
    assert found is None if problem is None else re.search(problem, str(found))
    monkeypatch.setenv("NCCL_HOSTID", "rank0")
    assert nccl.sharing_problem() is None


# A reducer with a graph, over a communicator that CuPy destroys once Python collects it.
UNCLOSED = """
import gc, os, sys, weakref
from types import SimpleNamespace
import numpy as np
from tests.support.fake_nccl import Fabric, QueuedOperator
from test_nccl_library import modules
from treeattn.backends.cpu import MergeOperator
from treeattn.collectives import build
from treeattn.collectives.runtime import nccl
from treeattn.collectives.executors import nccl as over_nccl
from treeattn.collectives.runtime.reducer import ReductionSpec

class NcclCommunicator:
    def __init__(self, *_):
        self.send = self.recv = lambda *_: stream.queue(tuple)
    def __del__(self, exit=os._exit):
        exit(9)  # ncclCommDestroy, which would wait for graphs

sys.modules.update(modules())
sys.modules["cupy.cuda.nccl"].NcclCommunicator = NcclCommunicator
stream = Fabric(2).streams[0]
two = SimpleNamespace(rank=0, size=2, bcast=lambda value, root: value)
reduction = ReductionSpec(nccl.connect(two, stream), QueuedOperator(MergeOperator(8), stream),
                      np.zeros((2, 10), np.float32), 1, stream)
reducer = over_nccl.plan(reduction, build("chain", 2))
reducer()
reducer()
assert stream.graph_launches == 1
own, left = [stream.capture(reducer)], weakref.ref(reducer)

def collect():
    global reduction, reducer
    del reduction, reducer
    gc.collect()
    assert left() is None
"""
ENDS = {
    "collected": "own.clear(); collect()",
    "collected before a graph of the caller's own": "collect()",
    "at the end of Python": "",
}


@pytest.mark.parametrize("end", ENDS)
def test_a_communicator_that_nobody_closed_is_left_alone(end: str) -> None:
    """In a process of its own, for the end of Python."""
    done = subprocess.run(
        [sys.executable, "-c", UNCLOSED + ENDS[end]],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


OPERATOR = MergeOperator(8)


def reduction(stream, buffer, operator=None):
    return ReductionSpec(stream, operator or QueuedOperator(OPERATOR, stream), buffer, 1, stream)


@pytest.mark.parametrize("scheme", ["all_gather_merge", "recursive_multiplying:factors=7"])
def test_arrivals_of_a_round_fold_in_at_most_two_launches(scheme):
    for rank, stream in enumerate(Fabric(7).streams):
        operator = QueuedOperator(OPERATOR, stream)
        over_nccl.plan(reduction(stream, np.zeros((7, 10), np.float32), operator), build(scheme, 7))
        assert operator.planned == (1 if rank < 2 else 2)


def test_a_capture_before_the_first_step_is_refused():
    stream = Fabric(2).streams[0]
    with over_nccl.plan(reduction(stream, np.zeros((2, 10), np.float32)), build("chain", 2)) as reducer:
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
        with over_nccl.plan(reduction(stream, buffer), build("chain", 2)) as reducer:
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
    reducer = over_nccl.plan(
        reduction(stream, np.zeros((3, 10), np.float32)), build("recursive_multiplying", 3)
    )
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
    reducer = over_nccl.plan(reduction(stream, np.zeros((2, 10), np.float32)), build("chain", 1))
    monkeypatch.setattr(stream, "close", threading.Event().wait)
    with pytest.raises(TransportError, match="drop CUDA graphs of your own that hold a step before close"):
        reducer.close()


def test_nccls_own_sum_needs_no_mpi() -> None:
    """Ranks of a process group may have no mpi4py."""
    program = "import sys; sys.modules['mpi4py'] = None; import treeattn.collectives.libraries.nccl_allreduce"
    assert subprocess.run([sys.executable, "-c", program], timeout=300).returncode == 0
