"""A decoder's step as one C call: the bits, the errors and the states of the three parts."""

from __future__ import annotations

import os
import signal
import weakref

import ml_dtypes
import numpy as np
import pytest

import treeattn
from tests.support import arguments
from tests.support.exporters import Interface
from treeattn import ArgumentError, StateError

pytestmark = pytest.mark.mpi

HEADS = {"batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 16}
TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


class Counted:
    """Steps that were one call."""

    def __init__(self, decoder):
        self.taken, self._whole = [], decoder._whole
        decoder._whole = self

    def __call__(self, *arrays):
        self.taken.append(self._whole(*arrays))
        return self.taken[-1]


@pytest.fixture(params=["slots", "program"])
def planned(request, comm):
    """A decoder of each executor that runs programs."""

    def make(**given):
        flat = {**HEADS, "dtype": "float32", "executor": request.param, **given}
        return treeattn.Decoder(comm, **arguments.plan(**flat))

    return make


def tensors(comm, dtype=np.float32, tokens=12000):
    """q is the same on every rank, k and v are not."""
    draw = np.random.default_rng(7)
    q = draw.standard_normal((2, 1, 4, 16), np.float32).astype(dtype)
    draw = np.random.default_rng(comm.rank)
    k, v = (draw.standard_normal((2, tokens, 2, 16), np.float32).astype(dtype) for _ in range(2))
    return q, k, v


def in_parts(decoder, *arrays):
    decoder.local(*arrays)
    decoder.reduce()
    return copies(decoder.finish())


def copies(results):
    return [np.copy(result) for result in results]


def assert_same(got, wanted):
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("dtype", "scheme"), zip(TYPES, ("hierarchical", "binary_tree", "circulant"), strict=True)
)
def test_same_bits_as_the_parts(comm, planned, dtype, scheme):
    """The cache grows, by new arrays or by lengths, past chunks and past the first workspace."""
    q, k, v = tensors(comm, TYPES[dtype])
    lengths = np.zeros(2, np.int64)
    with planned(dtype=dtype, scheme=scheme) as decoder, planned(dtype=dtype, scheme=scheme) as parts:
        counted = Counted(decoder)
        for tokens in (0, 3, 4, 4, 1000, 12000, 700):
            for arrays in (
                (q, k[:, :tokens], v[:, :tokens]),
                (q.copy(), k[:, :tokens], v[:, :tokens].copy(), np.array([tokens, tokens // 2])),
                (q, k, v, lengths),
            ):
                lengths[:] = tokens, tokens // 3
                assert_same(decoder(*arrays), in_parts(parts, *arrays))
        # Looked at closely: the first arrays, a copy of nothing (its strides are 0), more than the workspace.
        assert [index for index, taken in enumerate(counted.taken) if not taken] == [0, 1, 2]


def test_parts_and_whole_steps_take_turns(comm, planned):
    """What one has bound the other must not take for its own."""
    q, k, v = tensors(comm)
    first, second = (q, k, v, np.array([5, 6])), (q, k[:, :9], v[:, :9], None)
    with planned() as decoder, planned() as parts:
        for _ in range(3):
            for arrays in (first, second):
                wanted = in_parts(parts, *arrays)
                assert_same(decoder(*arrays), wanted)
                assert_same(in_parts(decoder, *arrays), wanted)
                decoder.begin(*arrays)
                assert_same(decoder.finish(), wanted)
        for arrays in (second, first):
            in_parts(decoder, *first)
            assert_same(decoder(*arrays), in_parts(parts, *arrays))


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
def test_what_needs_a_closer_look_gets_it(comm, planned, change):
    q, k, v = tensors(comm, tokens=20)
    arrays = change(q, k, v)
    with planned() as decoder, planned() as parts:
        for _ in range(2):
            decoder(q, k, v)
            assert_same(decoder(*arrays), in_parts(parts, *arrays))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda q, k, v: (q, k, v, np.array([2, 21])), id="too long"),
        pytest.param(lambda q, k, v: (q, k, v, np.array([1.0, 2.0])), id="lengths of no number of tokens"),
        pytest.param(lambda q, k, v: (q[:1], k, v), id="fewer sequences"),
        pytest.param(lambda q, k, v: (q, k[:, :4], v), id="k and v differ"),
        pytest.param(lambda q, k, v: (q, k[..., :8], v[..., :8]), id="a smaller head"),
        pytest.param(lambda q, k, v: (q, k.astype(np.float64), v), id="another type"),
        pytest.param(lambda q, k, v: (q, k.view(">f4"), v.view(">f4")), id="another byte order"),
        pytest.param(lambda q, k, v: (q, k, np.asfortranarray(v)), id="the last axis apart"),
        pytest.param(lambda q, k, v: (q, np.ma.masked_array(k), v), id="a mask"),
        pytest.param(lambda q, k, v: (q, k, None), id="no array"),
    ],
)
def test_same_errors_as_the_parts(comm, planned, change):
    """On every rank, and nothing is left half done: the next step is right."""
    q, k, v = tensors(comm, tokens=20)
    arrays = change(q, k, v)
    with planned() as decoder, planned() as parts:
        wanted = copies(decoder(q, k, v))
        for _ in range(2):
            with pytest.raises(ArgumentError) as said:
                in_parts(parts, *arrays)
            with pytest.raises(ArgumentError) as raised:
                decoder(*arrays)
            assert str(raised.value) == str(said.value)
        assert_same(decoder(q, k, v), wanted)


def test_states(comm, planned):
    q, k, v = tensors(comm, tokens=20)
    decoder = planned()
    wanted = copies(decoder(q, k, v))
    decoder.begin(q, k, v)
    with pytest.raises(StateError, match=r"begin\(\) began a step"):
        decoder(q, k, v)
    assert_same(decoder.finish(), wanted)
    assert_same(decoder(q, k, v), wanted)
    decoder.close()
    with pytest.raises(StateError, match="closed"):
        decoder(q, k, v)


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
def test_elsewhere_there_are_three_parts(planned, given):
    with planned(**given) as decoder:
        assert decoder._whole is None


def test_a_wait_that_outlasts_one_call(comm, planned):
    """The last rank comes when the others have gone on in Python and count themselves as waiting."""
    q, k, v = tensors(comm, tokens=20)
    last = comm.size - 1
    with planned() as decoder, planned() as parts:
        wanted = in_parts(parts, q, k, v)
        decoder(q, k, v)
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
        assert_same(decoder(q, k, v), wanted)
        assert reducer.blocking == 0
        assert all(waited)
        comm.Barrier()
        assert_same(decoder(q, k, v), wanted)


def test_ctrl_c_ends_a_wait(comm, planned):
    """Nobody else takes part."""
    q, k, v = tensors(comm, tokens=20)
    decoder = planned()
    decoder(q, k, v)
    comm.Barrier()
    if comm.rank == 0 and comm.size > 1:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        decoder._reducer._check_peers = lambda everyone: os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            decoder(q, k, v)
        signal.signal(signal.SIGINT, before)
        with pytest.raises(StateError, match="failed"):
            decoder(q, k, v)
    comm.Barrier()
    decoder.__exit__(KeyboardInterrupt)


def test_arrays_are_held_until_the_next_step(comm, planned):
    """No longer, and no shorter: the addresses are theirs."""
    q, k, v = tensors(comm, tokens=20)
    with planned() as decoder:
        decoder(q, k, v)
        seen = []
        for _ in range(3):
            new = k.copy()
            seen.append(weakref.ref(new))
            decoder(q, new, v, np.array([3, 4]))
            del new
            assert [one() is None for one in seen] == [True] * (len(seen) - 1) + [False]
