"""A decoder's step as one C call: who runs it, its bits and its errors, and what ends a wait."""

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
import weakref
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import treeattn
from tests.support import arguments
from tests.support.exporters import Interface
from tests.support.schemes import assert_equal, copies
from treeattn import ArgumentError, StateError, TransportError, collectives
from treeattn.backends.cpu import MergeOperator
from treeattn.collectives.executors import compiled, slots
from treeattn.collectives.runtime import mpi_communicator
from treeattn.collectives.runtime.process import Process
from treeattn.collectives.runtime.reducer import ReductionSpec
from treeattn.mpi import communicators

TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@pytest.fixture
def decoder_of(comm):
    """Makes decoders of one shape."""

    def make(**given):
        shape = {"batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "dtype": "float32"}
        return treeattn.Decoder(comm, **arguments.plan(**shape | given))

    return make


@pytest.fixture(params=["slots", "program"])
def planned(request, decoder_of):
    """Of each executor that runs programs."""
    return lambda **given: decoder_of(**{"executor": request.param} | given)


@pytest.fixture
def tensors(comm):
    """q is the same on every rank, k and v are not."""

    def tensors(dtype=np.float32, tokens=20):
        draws = np.random.default_rng(7), *[np.random.default_rng(comm.rank)] * 2
        shapes = (2, 1, 4, 16), (2, tokens, 2, 16), (2, tokens, 2, 16)
        return [
            draw.standard_normal(n, np.float32).astype(dtype) for draw, n in zip(draws, shapes, strict=True)
        ]

    return tensors


@pytest.fixture
def shared(comm):
    """Whether some ranks share a node."""
    return any(len(node) > 1 for node in comm.nodes)


def in_parts(decoder, *arrays):
    decoder.local(*arrays)
    decoder.reduce()
    return copies(decoder.finish())


# Who runs it


@pytest.mark.many_ranks
def test_all_ranks_take_the_fastest_that_all_can_have(comm, decoder_of, shared, monkeypatch):
    assert mpi_communicator.problem() is None  # this library is known
    fastest = "slots" if shared else "program"
    for given, executor, fallback in (
        ({}, fastest, None),
        ({"executor": "program"}, "program", None),
        ({"executor": "mpi"}, "mpi", None),
        ({"dtype": "float64"}, "mpi", "only float32 has one"),
        ({"scheme": "mpi_allreduce"}, None, None),
    ):
        with decoder_of(**given) as decoder:
            assert decoder.executor == executor
            assert decoder.fallback == fallback or fallback in decoder.fallback
    if comm.rank == comm.size - 1:
        monkeypatch.setattr(compiled, "problem", lambda reduction: "no compiler")
    with decoder_of() as decoder:
        assert decoder.executor == "mpi"
    with pytest.raises(TransportError, match=f"cannot run here: rank {comm.size - 1}: no compiler; take"):
        decoder_of(executor="program")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"executor": "program"}, "only float32 has one"),
        ({"executor": "mpi", "scheme": "mpi_allreduce"}, "mpi_allreduce has none; leave it out"),
        ({"executor": "mpi", "scheme": "kv_ring"}, "attends while it communicates; leave it out"),
    ],
)
def test_what_cannot_be_is_refused_on_every_rank(decoder_of, asked, said):
    with pytest.raises(TransportError, match=said):
        decoder_of(dtype="float64", **asked)


@pytest.mark.parametrize(
    "given",
    [
        {"executor": "mpi"},
        {"executor": None, "dtype": "float64"},
        {"executor": None, "scheme": "kv_ring"},
        {"executor": None, "scheme": "mpi_allreduce"},
        {"groups": 2},
    ],
)
def test_elsewhere_there_are_three_parts(decoder_of, given):
    with decoder_of(**given) as decoder:
        assert decoder._whole is None


def test_ranks_that_are_told_otherwise_of_their_cores_cut_records_alike(comm, decoder_of, monkeypatch):
    monkeypatch.setattr(communicators, "oversubscribed", lambda _: comm.rank == 0)
    q, k = np.ones((64, 1, 4, 16), np.float32), np.full((64, 1, 2, 16), float(comm.rank), np.float32)
    with decoder_of(batch=64, scheme="chain") as decoder:  # 18 KiB of records
        for _ in range(3):
            assert np.isfinite(decoder(q, k, k)[1]).all()


@pytest.mark.many_ranks
@pytest.mark.parametrize("fails", ["memfd_create", "posix_fallocate", "opened", "token"])
def test_no_shared_memory_is_said_in_one_line(comm, several, decoder_of, monkeypatch, fails):
    made, refused = slots._made, mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))

    def of_another(size, owner):
        offer, memory = made(size, owner)
        return offer._replace(token=bytes(len(offer.token))), memory

    places = {"opened": (slots.os, "open", refused), "token": (slots, "_made", of_another)}
    if comm.rank == comm.size - 1:
        monkeypatch.setattr(*places.get(fails, (os, fails, refused)))
    match = "ranks of a node send each other messages: .* rank "
    with contextlib.nullcontext() if comm.rank else pytest.warns(RuntimeWarning, match=match) as said:
        decoder = decoder_of()
    assert said is None or len(said) == 1
    assert decoder.executor == "program"
    assert decoder.fallback.startswith("rank ")
    decoder.close()
    said = "executor='slots' cannot run here: rank .*; take executor='program'"
    with pytest.raises(TransportError, match=said):
        decoder_of(executor="slots")


# Its bits and errors are those of the parts


@pytest.mark.parametrize(
    ("dtype", "scheme"), zip(TYPES, ("hierarchical", "binary_tree", "circulant"), strict=True)
)
def test_same_bits_as_the_parts(planned, tensors, dtype, scheme):
    """The cache grows, by new arrays or by lengths, past chunks and past the first workspace."""
    (q, k, v), lengths, taken = tensors(TYPES[dtype], 12000), np.zeros(2, np.int64), []
    with planned(dtype=dtype, scheme=scheme) as decoder, planned(dtype=dtype, scheme=scheme) as parts:
        whole = decoder._whole
        decoder._whole = lambda *arrays: taken.append(whole(*arrays)) or taken[-1]
        vars(decoder.plan)["fused_step"] = None  # not tried again
        for tokens in (0, 3, 4, 4, 1000, 12000, 700):
            for arrays in (
                (q, k[:, :tokens], v[:, :tokens]),
                (q.copy(), k[:, :tokens], v[:, :tokens].copy(), np.array([tokens, tokens // 2])),
                (q, k, v, lengths),
            ):
                lengths[:] = tokens, tokens // 3
                assert_equal(decoder(*arrays), in_parts(parts, *arrays))
    # Looked at closely: the first arrays, a copy of nothing (its strides are 0), more than the workspace.
    assert [index for index, one in enumerate(taken) if not one] == [0, 1, 2]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda q, k, v: (q, k, v, [3, 4]), id="lengths are a list"),
        pytest.param(lambda q, k, v: (q, k, v, np.array([3, 4], np.int32)), id="lengths of another type"),
        pytest.param(lambda q, k, v: (q, k, v, np.array([3, 9, 4])[::2]), id="lengths apart"),
        pytest.param(lambda q, k, v: (Interface(q), Interface(k), Interface(v), None), id="other containers"),
        pytest.param(lambda q, k, v: (q.view(np.memmap), k, v, None), id="a subclass"),
        pytest.param(lambda q, k, v: (q, k[::-1, ::-1], v[:, :, ::-1], None), id="any strides"),
        pytest.param(lambda q, k, v: (q, np.zeros_like(k), v, np.array([0, 0])), id="nothing to see"),
    ],
)
def test_what_needs_a_closer_look_gets_it(planned, tensors, change):
    arrays = change(*tensors())
    with planned() as decoder, planned() as parts:
        for _ in range(2):
            decoder(*tensors())
            assert_equal(decoder(*arrays), in_parts(parts, *arrays))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda q, k, v: (q, k, v, np.array([2, 21])), id="too long"),
        pytest.param(lambda q, k, v: (q, k, v, np.array([1.0, 2.0])), id="lengths of no number of tokens"),
        pytest.param(lambda q, k, v: (q[:1], k, v), id="fewer sequences"),
        pytest.param(lambda q, k, v: (q, k[:, :4], v), id="k and v differ"),
        pytest.param(lambda q, k, v: (q, k[0, 0, 0], v[0, 0, 0]), id="one axis"),
        pytest.param(lambda q, k, v: (q, k[..., :8], v[..., :8]), id="a smaller head"),
        pytest.param(lambda q, k, v: (q, k.astype(np.float64), v), id="another type"),
        pytest.param(lambda q, k, v: (q, k.view(">f4"), v.view(">f4")), id="another byte order"),
        pytest.param(lambda q, k, v: (q, k, np.asfortranarray(v)), id="the last axis apart"),
        pytest.param(lambda q, k, v: (q, np.ma.masked_array(k), v), id="a mask"),
        pytest.param(lambda q, k, v: (q, k, None), id="no array"),
    ],
)
def test_same_errors_as_the_parts(planned, tensors, change):
    """On every rank, and nothing is left half done: the next step is right."""
    arrays = change(*tensors())
    with planned() as decoder, planned() as parts:
        wanted = copies(decoder(*tensors()))
        for _ in range(2):
            with pytest.raises(ArgumentError) as said:
                in_parts(parts, *arrays)
            with pytest.raises(ArgumentError) as raised:
                decoder(*arrays)
            assert str(raised.value) == str(said.value)
        assert_equal(decoder(*tensors()), wanted)


def test_arrays_are_held_until_the_next_step(planned, tensors):
    """No longer, and no shorter: the addresses are theirs."""
    q, k, v = tensors()
    with planned() as decoder:
        decoder(q, k, v)
        seen = []
        for _ in range(3):
            new = k.copy()
            seen.append(weakref.ref(new))
            decoder(q, new, v, np.array([3, 4]))
            del new
            assert [one() is None for one in seen] == [True] * (len(seen) - 1) + [False]


# What ends a wait


@pytest.mark.many_ranks
def test_an_error_of_mpi_names_round_and_rank(comm):
    """Rank 0 of each pair sends more than the other has room for."""
    pair = comm.Split(comm.rank // 2, comm.rank)
    buffer = np.zeros((8 if pair.rank == 0 else 4, 18), np.float32)
    spec = ReductionSpec(pair, MergeOperator(16), buffer)
    step = compiled.plan(spec, collectives.build("recursive_doubling", pair.size))
    if pair.size == 1 or pair.rank == 0:
        step()
    else:
        with pytest.raises(TransportError, match=r"recursive_doubling, round 1: .* rank 0 failed: .*trunc"):
            step()
    comm.Barrier()


def test_a_wait_that_outlasts_one_call(comm, planned, tensors):
    """The last rank comes when the others have gone on in Python and count themselves as waiting."""
    arrays, last = tensors(), comm.size - 1
    with planned() as decoder, planned() as parts:
        wanted = in_parts(parts, *arrays)
        decoder(*arrays)
        decoder.out[:] = np.nan
        reducer, waited, told = decoder._reducer, [], []

        def waits(everyone):
            waited.append(reducer.blocking)
            if not told:
                told.append(comm.isend(None, last))

        if comm.rank < last:
            reducer._check_peers = waits
        else:
            for rank in range(last):
                comm.recv(source=rank)
        assert_equal(decoder(*arrays), wanted)
        assert reducer.blocking == 0
        assert all(waited)
        comm.Barrier()
        assert_equal(decoder(*arrays), wanted)


@pytest.mark.many_ranks
@pytest.mark.parametrize("bound", [False, True])
def test_ctrl_c_ends_a_wait(comm, planned, tensors, bound):
    """Nobody else takes part: without the way back to Python it would never end. bound: within one call."""
    decoder, arrays = planned(), tensors()
    if bound:
        decoder(*arrays)
    comm.Barrier()
    if comm.rank == 0 and comm.size > 1:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            decoder(*arrays)
        signal.signal(signal.SIGINT, before)
        with pytest.raises(StateError, match=r"failed|without start"):
            decoder(*arrays)
    comm.Barrier()
    decoder.__exit__(KeyboardInterrupt)


@pytest.mark.many_ranks
def test_messages_of_the_caller_move_while_a_step_waits(comm, planned, tensors):
    """Rank 1 comes to the step only when rank 0, which waits there, has taken a large message from it."""
    large = np.zeros(1 << 22, np.uint8)
    with planned(scheme="recursive_doubling") as step:
        arriving = comm.Irecv(large, 1) if comm.rank == 0 and comm.size > 1 else MPI.REQUEST_NULL
        if comm.rank == 1:
            comm.Send(large, 0)
        step(*tensors())
        arriving.Wait()


def test_a_rank_that_has_ended_is_named(comm, decoder_of, tensors, shared):
    """A process that ended stands for the last rank, which does not take part."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    owner = Process.of(ended.pid)
    assert owner.state != "ended"
    ended.wait()
    if comm.size != 2 or not shared:
        pytest.skip("one rank of a node waits for the other of two")
    step = decoder_of(executor="slots", scheme="recursive_doubling")
    if comm.rank == 0:
        parts = step._reducer._slots._parts
        parts[1] = parts[1]._replace(owner=owner)
        with pytest.raises(TransportError, match="recursive_doubling, round 1: rank 1 has ended, while this"):
            step(*tensors())
    comm.Barrier()
    step.__exit__(TransportError)
