"""The NCCL executor, all ranks in one process: the bits of the loopback definition, and nothing hangs."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from catalog_variants import VARIANTS, label
from fake_nccl import Fabric, Hang, QueuedOperator
from test_loopback import built

from tests.made_partials import own_part, partials
from treeattn.backends.cpu import MergeOperator
from treeattn.collectives import Schedule, Transfer, build, captured
from treeattn.collectives.executors import loopback
from treeattn.collectives.executors.nccl import Reducer
from treeattn.collectives.libraries import nccl_allreduce
from treeattn.collectives.reducer import Reduction
from treeattn.errors import ScheduleError, TransportError

OPERATOR = MergeOperator(8)


def reduction(stream, buffer, operator=None, group=1):
    return Reduction(stream, operator or QueuedOperator(OPERATOR, stream), buffer, group, stream)


def reducers(fabric, schedule, buffers):
    return [
        Reducer(reduction(stream, buffer), schedule)
        for stream, buffer in zip(fabric.streams, buffers, strict=True)
    ]


@pytest.mark.parametrize("variant", VARIANTS, ids=label)
def test_same_bits_as_loopback(variant):
    """The first step as it is, the second captured, the third launched again."""
    for size in range(1, 10):
        schedule = built(variant, size)
        values = partials(size, 7, 8, seed=size)
        wanted = loopback.run(schedule, values, OPERATOR)
        fabric = Fabric(size, seed=size)
        buffers = [value.copy() for value in values]
        steps = reducers(fabric, schedule, buffers)
        for _ in range(3):
            for buffer, value, step in zip(buffers, values, steps, strict=True):
                buffer[:] = value
                step()
            fabric.run()
            for rank, buffer in enumerate(buffers):
                np.testing.assert_array_equal(own_part(schedule, rank, buffer), wanted[rank])
        if size > 1:
            assert [stream.graph_launches for stream in fabric.streams] == [2] * size
        for step in steps:
            step.close()
        assert {stream.closed for stream in fabric.streams} == {"closed"}


def test_swap_in_one_round_reads_the_state_before_it():
    swap = (Transfer(0, 1, range(1), False), Transfer(1, 0, range(1), False))
    schedule = Schedule("swap first", 2, 1, (swap, *build("recursive_doubling", 2).rounds))
    for seed in range(4):  # messages move in either order
        values = partials(2, 5, 8)
        buffers = [value.copy() for value in values]
        fabric = Fabric(2, seed)
        for step in reducers(fabric, schedule, buffers):
            step()
        fabric.run()
        np.testing.assert_array_equal(buffers[0], loopback.run(schedule, values, OPERATOR)[0])


@pytest.mark.parametrize(
    ("scheme", "launches"), [("all_gather_merge", 2), ("recursive_multiplying:factors=7", 2)]
)
def test_arrivals_of_a_round_fold_in_at_most_two_launches(scheme, launches):
    schedule = build(scheme, 7)
    fabric = Fabric(7)
    for rank, stream in enumerate(fabric.streams):
        operator = QueuedOperator(OPERATOR, stream)
        Reducer(reduction(stream, np.zeros((7, 10), np.float32), operator), schedule)
        assert operator.planned == (1 if rank < 2 else launches)


def test_whole_groups_of_records_travel():
    """A chunk is never cut within a group: two groups over four chunks leave two of them empty."""
    schedule = build("ring", 4)
    fabric = Fabric(4)
    values = partials(4, 6, 8)
    buffers = [value.copy() for value in values]
    for stream, buffer in zip(fabric.streams, buffers, strict=True):
        Reducer(reduction(stream, buffer, group=3), schedule)()
    fabric.run()
    for buffer in buffers[1:]:
        np.testing.assert_array_equal(buffer, buffers[0])


def test_misuse_is_refused():
    fabric = Fabric(2)
    stream = fabric.streams[0]
    schedule, buffer = build("chain", 2), np.zeros((2, 10), np.float32)
    with pytest.raises(ScheduleError, match="the communicator has 2"):
        Reducer(reduction(stream, buffer), build("chain", 3))
    for wrong in (np.zeros((2, 20), np.float32)[:, ::2], np.zeros((2, 10))):
        with pytest.raises(ScheduleError, match="C-contiguous float32"):
            Reducer(reduction(stream, wrong), schedule)
        with pytest.raises(ScheduleError, match="C-contiguous float32"):
            nccl_allreduce.plan(reduction(stream, wrong))
    with Reducer(reduction(stream, buffer), schedule) as reducer:
        with pytest.raises(TransportError, match="run one before capturing one"):
            stream.capture(reducer)
        stream._recorded = None
        reducer()  # nothing has begun: the advice can be followed
        stream.queued.clear()
        stream.waited = True
    with pytest.raises(ScheduleError, match="closed"):
        reducer()
    with pytest.raises(KeyError), Reducer(reduction(stream, buffer), schedule):
        raise KeyError
    assert stream.closed == "aborted"


@pytest.mark.parametrize("lost", [False, True], ids=["body", "launch"])
def test_the_graph_goes_before_a_communicator_that_is_aborted(lost):
    """An error in the body, or in a launch, whose traceback is alive meanwhile."""
    stream = Fabric(2).streams[0]
    buffer = np.zeros((2, 10), np.float32)

    def fail():
        with Reducer(reduction(stream, buffer), build("chain", 2)) as reducer:
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
    monkeypatch.setattr(captured, "_ABORT_SECONDS", 0.05)


def hanging(steps=1):
    """A reducer of rank 0, whose peers never come, and its stream."""
    stream = Fabric(3).streams[0]
    reducer = Reducer(reduction(stream, np.zeros((3, 10), np.float32)), build("recursive_multiplying", 3))
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
    with pytest.raises(ScheduleError, match="a step on a reducer that is closed"):
        reducer()
    reducer.close()  # nothing is left to do


def test_what_nccl_finds_out_ends_a_wait(hurried, monkeypatch):
    monkeypatch.setenv("TREEATTN_TIMEOUT", "60")
    reducer, stream = hanging()
    stream.broken = True
    with pytest.raises(TransportError, match="broke off"):
        reducer.synchronize()
    assert stream.closed == "aborted"


def test_closing_over_a_step_that_hangs_ends(hurried, monkeypatch):
    reducer, stream = hanging()
    monkeypatch.setattr(stream, "synchronize_all", threading.Event().wait)
    with pytest.raises(TransportError, match="0.05 s without rank 1 and 2"):
        reducer.close()
    assert stream.closed == "aborted"
    assert reducer in captured._left_behind


def test_closing_waits_for_every_stream(monkeypatch):
    """The last step may be in one that is no longer current."""
    fabric = Fabric(1)
    (stream,) = fabric.streams
    reducer = Reducer(reduction(stream, np.zeros((2, 10), np.float32)), build("chain", 1))
    waited = []
    monkeypatch.setattr(stream, "synchronize", lambda: waited.append("current"))
    monkeypatch.setattr(stream, "synchronize_all", lambda: waited.append("all"))
    monkeypatch.setattr(stream, "close", lambda: waited.append("closed"))
    reducer.close()
    assert waited == ["all", "closed"]


def test_an_abort_that_hangs_is_left_behind(hurried, monkeypatch):
    reducer, stream = hanging()
    monkeypatch.setattr(stream, "abort", threading.Event().wait)
    with pytest.raises(TransportError, match="without rank 1 and 2"):
        reducer.synchronize()


def test_a_graph_of_the_callers_that_outlives_its_reducer_is_named(hurried, monkeypatch):
    """NCCL's end waits for it: here as long as an event that nobody sets."""
    stream = Fabric(1).streams[0]
    reducer = Reducer(reduction(stream, np.zeros((2, 10), np.float32)), build("chain", 1))
    monkeypatch.setattr(stream, "close", threading.Event().wait)
    with pytest.raises(TransportError, match="drop CUDA graphs of your own that hold a step before close"):
        reducer.close()


# What the fake would say of a wrong executor: it can fail.


def post(fabric, rank, *posts, grouped=True):
    stream = fabric.streams[rank]
    if grouped:
        stream.group_start()
    for kind, peer, size in posts:
        getattr(stream, kind)(np.zeros(size, np.float32), peer)
    if grouped:
        stream.group_end()


@pytest.mark.parametrize(
    ("posts", "message"),
    [
        ({0: [("send", 1, 4)]}, "rank 0 waits: send, rank 1"),
        ({1: [("receive", 0, 4)]}, "rank 1 waits: receive, rank 0"),
        ({0: [("send", 1, 4)], 1: [("receive", 0, 3)]}, "sends 4 elements, rank 1 takes 3"),
        ({0: [("send", 1, 4)], 1: [("receive", 2, 4)]}, "rank 1 waits: receive, rank 2"),
    ],
)
def test_the_fake_sees_what_hangs(posts, message):
    fabric = Fabric(3)
    for rank, its_posts in posts.items():
        post(fabric, rank, *its_posts)
    with pytest.raises(Hang, match=message):
        fabric.run()


@pytest.mark.parametrize("grouped", [True, False])
def test_the_fake_sees_an_exchange_outside_a_group(grouped):
    fabric = Fabric(2)
    for rank in (0, 1):
        post(fabric, rank, ("send", 1 - rank, 4), ("receive", 1 - rank, 4), grouped=grouped)
    if grouped:
        fabric.run()
    else:
        with pytest.raises(Hang, match="rank 0 waits: send, rank 1; rank 1 waits: send, rank 0"):
            fabric.run()


def test_the_fake_sees_a_capture_on_one_side_only():
    fabric = Fabric(2)
    fabric.streams[0].capture(lambda: post(fabric, 0, ("send", 1, 4)))()
    post(fabric, 1, ("receive", 0, 4))
    with pytest.raises(Hang, match="captured on one side"):
        fabric.run()
