"""A step as one C call: who runs it, what an error of MPI says, and what ends a wait."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from mpi4py import MPI

import treeattn
from treeattn import TransportError, collectives
from treeattn.backends.cpu import MergeOperator
from treeattn.collectives.executors import compiled, slots
from treeattn.collectives.runtime import mpi_communicator
from treeattn.collectives.runtime.communicator import Process
from treeattn.collectives.runtime.reducer import ReductionSpec
from treeattn.mpi import communicators

pytestmark = [pytest.mark.mpi, pytest.mark.many_ranks]

EXECUTORS = ("mpi", "program", "slots")
HEADS = {"heads": 4, "kv_heads": 4, "head_dim": 16}


def shared(comm):
    """Whether some ranks share a node."""
    return any(len(node) > 1 for node in communicators.node_groups(comm))


def reduction(comm, records):
    """(what is reduced, by which schedule)"""
    buffer = np.full((records, 18), comm.rank, np.float32)
    schedule = collectives.build("recursive_doubling", comm.size)
    return ReductionSpec(comm, MergeOperator(16), buffer), schedule


def reducer(comm, records):
    return compiled.plan(*reduction(comm, records))


def over_memory(comm, records=4):
    """Slots between all ranks."""
    nodes = communicators.node_groups(comm)
    return slots.plan(*reduction(comm, records), nodes=nodes, oversubscribed=comm.size > 2)


def test_an_error_of_mpi_names_round_and_rank(comm):
    """Rank 0 of each pair sends more than the other has room for."""
    pair = comm.Split(comm.rank // 2, comm.rank)
    if pair.size == 1 or pair.rank == 0:
        reducer(pair, 8)()
    else:
        with pytest.raises(TransportError, match=r"recursive_doubling, round 1: .* rank 0 failed: .*trunc"):
            reducer(pair, 4)()
    comm.Barrier()


def interrupted(step):
    """Nobody else takes part: without the way back to Python the wait would never end."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        step()
    signal.signal(signal.SIGINT, before)
    with pytest.raises(treeattn.StateError, match=r"failed|without start"):
        step()


def test_all_ranks_take_the_fastest_that_all_can_have(comm, monkeypatch):
    with treeattn.Decoder(comm, **HEADS) as decoder:
        assert decoder.executor == ("slots" if shared(comm) else "program")
        assert decoder.fallback is None
    for name in ("program", "mpi"):
        with treeattn.Decoder(comm, **HEADS, scheme=treeattn.Reduction(executor=name)) as decoder:
            assert decoder.executor == name
    with treeattn.Decoder(comm, **HEADS, dtype="float64") as decoder:
        assert decoder.executor == "mpi"
        assert "only float32 has one" in decoder.fallback
    with treeattn.Decoder(comm, **HEADS, scheme="mpi_allreduce") as decoder:
        assert decoder.executor is None
    if comm.rank == comm.size - 1:
        monkeypatch.setattr(compiled, "problem", lambda reduction: "no compiler")
    with treeattn.Decoder(comm, **HEADS) as decoder:
        assert decoder.executor == "mpi"
    with pytest.raises(TransportError, match=f"cannot run here: rank {comm.size - 1}: no compiler; take"):
        treeattn.Decoder(comm, **HEADS, scheme=treeattn.Reduction(executor="program"))


def warned(comm, match):
    """On rank 0."""
    return contextlib.nullcontext() if comm.rank else pytest.warns(RuntimeWarning, match=match)


def test_this_library_is_known():
    assert mpi_communicator.problem() is None


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"executor": "program"}, "only float32 has one"),
        ({"executor": "mpi", "scheme": "mpi_allreduce"}, "mpi_allreduce has none; leave it out"),
        ({"executor": "mpi", "scheme": "kv_ring"}, "attends while it communicates; leave it out"),
    ],
)
def test_what_cannot_be_is_refused_on_every_rank(comm, asked, said):
    with pytest.raises(TransportError, match=said):
        treeattn.Decoder(comm, **HEADS, dtype="float64", scheme=treeattn.Reduction(**asked))


def test_merge_and_decode_take_it_too(comm):
    draw = np.random.default_rng(comm.rank)
    q, k, v = (draw.random((1, n, 4, 16), np.float32) for n in (1, 5, 5))
    q = comm.bcast(q)
    parts = draw.random((3, 8), np.float32), draw.random(3, np.float32)
    ways = [treeattn.Reduction(executor=name) for name in EXECUTORS]
    results = [treeattn.decode(q, k, v, comm=comm, scheme=how) for how in ways]
    merged = [treeattn.merge(*parts, comm=comm, scheme=how) for how in ways]
    for by_mpi, *others in (results, merged):
        for other in others:
            np.testing.assert_array_equal(by_mpi[0], other[0])
            np.testing.assert_array_equal(by_mpi[1], other[1])


@pytest.mark.parametrize("waits_for", ["messages", "a flag"])
def test_ctrl_c_ends_a_wait(comm, waits_for):
    stuck = reducer(comm, 4) if waits_for == "messages" else over_memory(comm)
    if comm.rank == 0 and comm.size > 1:
        interrupted(stuck)
    comm.Barrier()
    stuck.__exit__(KeyboardInterrupt)


def test_messages_of_the_caller_move_while_flags_are_awaited(comm):
    """Rank 1 comes to the step only when rank 0, which waits there, has taken a large message from it."""
    large = np.zeros(1 << 22, np.uint8)
    with over_memory(comm) as step:
        arriving = comm.Irecv(large, 1) if comm.rank == 0 and comm.size > 1 else MPI.REQUEST_NULL
        if comm.rank == 1:
            comm.Send(large, 0)
        step()
        arriving.Wait()


def test_a_rank_that_has_ended_is_named(comm):
    """A process that ended stands for the last rank, which does not take part."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    owner = Process.of(ended.pid)
    assert not owner.ended
    ended.wait()
    last = comm.size - 1
    step = over_memory(comm)
    if shared(comm) and comm.rank == 0 and comm.size == 2:
        parts = step._slots._parts
        parts[last] = parts[last]._replace(owner=owner)
        with pytest.raises(TransportError, match="recursive_doubling, round 1: rank 1 has ended, while this"):
            step()
    comm.Barrier()
    step.__exit__(TransportError)


@pytest.mark.parametrize("fails", ["memfd_create", "posix_fallocate", "opened", "token"])
def test_no_shared_memory_is_said_in_one_line(comm, monkeypatch, fails):
    """On one rank, and all do without."""
    if comm.size == 1:
        return  # nothing is shared
    last = comm.size - 1
    if comm.rank == last:
        break_sharing(monkeypatch, fails)
    with warned(comm, "ranks of a node send each other messages: .* rank ") as said:
        decoder = treeattn.Decoder(comm, **HEADS)
    assert said is None or len(said) == 1
    assert decoder.executor == "program"
    assert decoder.fallback.startswith("rank ")
    decoder.close()
    with pytest.raises(
        TransportError, match="executor='slots' cannot run here: rank .*; take executor='program'"
    ):
        treeattn.Decoder(comm, **HEADS, scheme=treeattn.Reduction(executor="slots"))


def break_sharing(monkeypatch, fails):
    def refused(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    if fails in ("memfd_create", "posix_fallocate"):
        monkeypatch.setattr(os, fails, refused)
    elif fails == "opened":
        monkeypatch.setattr(slots.os, "open", refused)
    else:
        made = slots._made

        def another(size, owner):
            offer, memory = made(size, owner)
            return offer._replace(token=bytes(len(offer.token))), memory

        monkeypatch.setattr(slots, "_made", another)
