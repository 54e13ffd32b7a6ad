"""A step as one C call: who runs it, what an error of MPI says, and what ends a wait."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest

import treeattn
from treeattn import TransportError, collectives
from treeattn.backends.cpu import MergeOperator, NullOperator
from treeattn.collectives.executors import mpi_abi, program
from treeattn.collectives.reducer import Reduction

pytestmark = pytest.mark.mpi

HEADS = {"heads": 4, "kv_heads": 4, "head_dim": 16}


def reducer(comm, records):
    schedule = collectives.build("recursive_doubling", comm.size)
    buffer = np.full((records, 18), comm.rank, np.float32)
    return program.Reducer(Reduction(comm, MergeOperator(16), buffer), schedule)


def test_an_error_of_mpi_names_round_and_rank(comm):
    """Rank 0 of each pair sends more than the other has room for."""
    pair = comm.Split(comm.rank // 2, comm.rank)
    if pair.size == 1 or pair.rank == 0:
        reducer(pair, 8)()
    else:
        with pytest.raises(
            TransportError, match=r"recursive_doubling, round 1: .* rank 0 failed: .*[Tt]runc"
        ):
            reducer(pair, 4)()
    comm.Barrier()


def test_ctrl_c_ends_a_wait(comm):
    """Nobody else takes part: without the way back to Python the wait would never end."""
    stuck = reducer(comm, 4)
    if comm.rank == 0 and comm.size > 1:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            stuck()
        signal.signal(signal.SIGINT, before)
        with pytest.raises(treeattn.ScheduleError, match="failed"):
            stuck()
    comm.Barrier()
    stuck.__exit__(KeyboardInterrupt)


def test_a_null_operator_merges_nothing(comm):
    """Rank 0 is the root, to which nothing is copied."""
    buffer, schedule = np.full((4, 18), comm.rank, np.float32), collectives.build("binary_tree", comm.size)
    with program.Reducer(Reduction(comm, NullOperator(16), buffer), schedule) as step:
        step()
    np.testing.assert_array_equal(buffer, 0)


def test_all_ranks_take_the_fastest_that_all_can_have(comm, monkeypatch):
    with treeattn.Decoder(comm, **HEADS) as decoder:
        assert decoder.executor == "program"
    with treeattn.Decoder(comm, **HEADS, executor="mpi") as decoder:
        assert decoder.executor == "mpi"
    with treeattn.Decoder(comm, **HEADS, dtype="float64") as decoder:
        assert decoder.executor == "mpi"
    with treeattn.Decoder(comm, **HEADS, scheme="mpi_allreduce") as decoder:
        assert decoder.executor is None
    if comm.rank == comm.size - 1:
        monkeypatch.setattr(program, "problem", lambda reduction: "no compiler")
    with treeattn.Decoder(comm, **HEADS) as decoder:
        assert decoder.executor == "mpi"
    with pytest.raises(TransportError, match=f"cannot run here: rank {comm.size - 1}: no compiler; take"):
        treeattn.Decoder(comm, **HEADS, executor="program")


def test_an_unknown_binary_interface_is_said_in_one_line(comm, monkeypatch):
    monkeypatch.setattr(mpi_abi, "problem", lambda: "the binary interface of this MPI library is unknown")
    if comm.rank == 0:
        with pytest.warns(RuntimeWarning, match="Python runs every round, since rank 0: .* is unknown"):
            decoder = treeattn.Decoder(comm, **HEADS)
    else:
        decoder = treeattn.Decoder(comm, **HEADS)
    assert decoder.executor == "mpi"
    decoder.close()


def test_this_library_is_known():
    assert mpi_abi.problem() is None


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"executor": "fastest"}, "unknown: use one of"),
        ({"executor": "program", "dtype": "float64"}, "only float32 has one"),
        ({"executor": "mpi", "scheme": "mpi_allreduce"}, "mpi_allreduce has none; leave it out"),
        ({"executor": "mpi", "scheme": "kv_ring"}, "attends while it communicates; leave it out"),
    ],
)
def test_what_cannot_be_is_refused_on_every_rank(comm, asked, said):
    with pytest.raises(TransportError, match=said):
        treeattn.Decoder(comm, **HEADS, **asked)


def test_ranks_must_ask_for_the_same(comm):
    asked = "mpi" if comm.rank == comm.size - 1 else "program"
    if comm.size > 1:
        with pytest.raises(treeattn.ArgumentError, match="executor differs between ranks"):
            treeattn.Decoder(comm, **HEADS, executor=asked)


def test_merge_and_decode_take_it_too(comm):
    draw = np.random.default_rng(comm.rank)
    q, k, v = (draw.random((1, n, 4, 16), np.float32) for n in (1, 5, 5))
    q = comm.bcast(q)
    results = [treeattn.decode(q, k, v, comm=comm, executor=name) for name in ("mpi", "program")]
    parts = draw.random((3, 8), np.float32), draw.random(3, np.float32)
    merged = [treeattn.merge(*parts, comm=comm, executor=name) for name in ("mpi", "program")]
    for one, other in (results, merged):
        np.testing.assert_array_equal(one[0], other[0])
        np.testing.assert_array_equal(one[1], other[1])


def test_start_does_not_wait(comm):
    """Others begin only when this rank has come back from start()."""
    with reducer(comm, 4) as step:
        for late in range(comm.size):
            if comm.rank != late:
                step.start()
            comm.Barrier()
            if comm.rank == late:
                step.start()
            step.wait()
