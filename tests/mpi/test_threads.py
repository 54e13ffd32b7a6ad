"""Threads and forks of one process: what a step leaves in an object is one thread's, and so is a communicator
of several ranks, whose collectives would meet in another order on another rank; a fork has none."""

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from mpi4py import MPI

import treeattn
from tests.support import forked
from tests.support.public_verbs import OBJECTS
from tests.support.schemes import assert_equal, copies
from treeattn import cache_nodes
from treeattn.errors import StateError
from treeattn.mpi import communicators

HEADS = {"heads": 2, "kv_heads": 2, "head_dim": 8}


@pytest.fixture
def run():
    """Run a call in a thread of its own: what it returned or raised."""

    def run(call):
        with ThreadPoolExecutor(1) as thread:
            done = thread.submit(call)
        return done.exception() or done.result()

    return run


@pytest.fixture
def often():
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def drawn(seed, tokens=5):
    draw = np.random.default_rng(seed)
    return [draw.standard_normal((1, count, 2, 8), np.float32) for count in (1, tokens, tokens)]


@pytest.mark.parametrize("name", OBJECTS)
def test_a_second_thread(comm, run, name):
    """Made here, used first in a thread that has ended, then here: all calls of another are refused, and what
    it would have changed is not."""
    make, calls_of = OBJECTS[name]
    made = make(comm)
    calls = calls_of(made)
    assert not isinstance(run(calls[0]), Exception)
    wanted = calls[0]()
    wanted = None if wanted is None else copies(wanted)
    for call in calls:
        refused = run(call)
        assert isinstance(refused, StateError)
        assert "is used by another thread (MainThread), which still runs" in str(refused)
    if wanted is not None:
        assert_equal(calls[0](), wanted)
    if hasattr(made, "close"):
        made.close()


def test_decode_in_many_threads_of_one_rank(often):
    """Each with the results that it has alone: without a communicator, or with that of a rank alone."""
    comms = [communicators.alone()] if communicators.world().size > 1 else [None, communicators.alone()]
    given = [drawn(seed) for seed in range(4)]
    for comm in comms:
        wanted = [treeattn.decode(*arrays, comm=comm) for arrays in given]
        with ThreadPoolExecutor(len(given)) as threads:
            got = threads.map(
                lambda arrays, comm=comm: [treeattn.decode(*arrays, comm=comm) for _ in range(25)], given
            )
        for results, whole in zip(got, wanted, strict=True):
            for one in results:
                assert_equal(one, whole)


@pytest.mark.parametrize("verb", ["decode", "merge", "a decoder", "a cache"])
def test_a_second_thread_over_one_communicator(comm, run, verb):
    """Of several ranks: refused before anything is sent, since no rank waits for it."""
    q, k, v = drawn(0)
    parts = np.ones((3, 8), np.float32), np.ones(3, np.float32)
    calls = {
        "decode": lambda: treeattn.decode(q, k, v, comm=comm),
        "merge": lambda: treeattn.merge(*parts, comm=comm),
        "a decoder": lambda: treeattn.Decoder(comm, **HEADS),
        "a cache": lambda: treeattn.ShardedCache(comm, capacity=64, kv_heads=2, head_dim=8),
    }
    treeattn.decode(q, k, v, comm=comm)
    if comm.size == 1:
        assert not isinstance(run(calls[verb]), Exception)
        return
    if comm.rank == 0:
        refused = run(calls[verb])
        assert isinstance(refused, StateError)
        assert "a communicator of its own" in str(refused)
    comm.barrier()
    own = comm.dup()
    assert not isinstance(run(lambda: treeattn.decode(q, k, v, comm=own)), Exception)
    own.free()


def test_a_second_thread_at_cache_nodes(comm, several, run):
    """It is refused in one line, and the nodes serve the first as before."""
    if comm.rank:
        cache_nodes.serve(comm)
        return
    (q, k, v), shape = drawn(0, 1), {"layers": 1, "kv_heads": 2, "head_dim": 8, "dtype": "float32"}
    with cache_nodes.connect(comm) as nodes:
        held = nodes.cache(**shape, capacity=64)
        out = held.step(0, q, k, v)[0].copy()
        before = held.totals.copy(), nodes.messages
        calls = (
            lambda: held.step(0, q, k, v),
            lambda: held.append(0, k, v),
            lambda: held.rollback([0]),
            lambda: held.select([0, 0]),
            lambda: nodes.cache(**shape, capacity=8),
            nodes.close,
        )
        for call in calls:
            refused = run(call)
            assert isinstance(refused, StateError)
            assert "is used by another thread (MainThread)" in str(refused)
        np.testing.assert_array_equal(held.totals, before[0])
        assert nodes.messages == before[1]
        np.testing.assert_allclose(held.step(0, q, k, v)[0], out, rtol=1e-6)


def test_no_public_verb_serves_a_forked_process(comm):
    forked.check(comm, MPI.COMM_WORLD)
