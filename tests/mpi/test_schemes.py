"""What every scheme promises, whatever reduces: a schedule, the library's own operation or a baseline."""

import functools
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import treeattn
from tests.support.drawn import sample
from tests.support.problems import assert_exact, random_qkv
from tests.support.ranks import assert_same_bits, own_run
from tests.support.schemes import Way, assert_equal, copies
from treeattn import collectives, files, reference
from treeattn.baselines import BASELINES
from treeattn.errors import StateError
from treeattn.shards import parse_layout

DATA = Path(__file__).parent.parent / "data"
SCHEMES = [name for name in treeattn.schemes() if "nccl" not in name]
#: One of each kind: what reads a caller's arrays knows no schedule by name.
KINDS = ["chain", "hierarchical", "reduce_scatter_gather", "head_scatter", "mpi_allreduce", *BASELINES]
KINDS += ["kv_ring:rotation=full"]
BFLOAT16 = ml_dtypes.bfloat16


@pytest.fixture(params=KINDS)
def way(request, comm):
    return Way(comm, request.param)


@pytest.fixture(params=sample(10, SCHEMES))
def any_way(request, comm):
    return Way(comm, request.param)


@functools.cache
def real_cache():
    """The file, q of it, and (out, lse) that another program found."""
    cache, said = (files.open_cache(DATA / f"smollm2_layer17_4096{n}.safetensors") for n in ("", ".expected"))
    return cache, np.array(cache["q"]), [np.array(said[name]) for name in ("out", "lse")]


def check_real_cache(way, layout):
    cache, q, (out, lse) = real_cache()
    runs = parse_layout(layout).runs(4096, way.comm.rank, way.comm.size)
    own, scale = [files.load_runs(cache[name], runs) for name in "kv"], cache.scale()
    got = way.decode(q, *own, scale=scale)
    parts = way.comm.allgather(reference.partial(q, *own, scale=scale))
    heads = way.own_heads(q.shape[2])
    for one, wanted, bound in zip(
        got, (out[:, :, heads], lse[:, heads]), reference.error_bounds(parts), strict=True
    ):
        np.testing.assert_allclose(one, wanted, rtol=0, atol=bound)
    if not way.scattered:
        assert_same_bits(way.comm, *got)


def test_real_cache_matches_independent_expectation(any_way):
    check_real_cache(any_way, "contiguous")


def check_shards(way, tokens, dtype):
    q, k, v = random_qkv(tokens, batch=2, queries=3, heads=6, kv_heads=3, dtype=dtype)
    own = own_run(way.comm, tokens)
    out, lse = way.decode(q, k[:, own], v[:, own])
    assert out.dtype == lse.dtype == (np.float64 if dtype is np.float64 else np.float32)
    way.check((out, lse), q, k, v)
    if tokens == 0:
        assert not out.any()
        assert (lse == -np.inf).all()


@pytest.mark.parametrize(
    ("tokens", "dtype"), [(0, np.float64), (1, BFLOAT16), (3, np.float16), (257, np.float32)]
)
def test_ranks_without_tokens_are_ordinary(way, tokens, dtype):
    if way.scheme == "mpi_allreduce" and dtype is np.float64:
        with pytest.raises(treeattn.BackendError, match=r"float64.*take a scheme with a schedule"):
            check_shards(way, tokens, dtype)
    else:
        check_shards(way, tokens, dtype)


def test_hostile_values(any_way):
    """Scores of +-1e4, a fully masked row, NaN in one value: exact where defined, spoiled only there."""
    way, (q, k, v) = any_way, random_qkv(61, batch=2, heads=4, kv_heads=4, seed=3)
    k[:, ::7] *= 3e3
    own, lengths = own_run(way.comm, 61), np.array([61, 0])
    held = parse_layout("contiguous").shard_lengths(lengths, 61, way.comm.rank, way.comm.size)
    v[0, 60, 2, 5] = np.nan
    out, lse = way.decode(q, k[:, own], v[:, own], lengths=held)
    assert not out[1].any()
    assert (lse[1] == -np.inf).all()
    for at, head in enumerate(range(4)[way.own_heads(4)]):
        here, there = slice(at, at + 1), slice(head, head + 1)
        if head == 2:
            assert np.isnan(out[0, 0, at]).any()
        else:
            whole = (one[:, :, there] for one in (q, k, v))
            assert_exact((out[:, :, here], lse[:, here]), *whole, scale=1 / 8, lengths=lengths)
    if not way.scattered:
        assert_same_bits(way.comm, out, lse)


def test_decoder_follows_a_growing_cache(way):
    """One preallocated array per rank, interleaved tokens, `lengths` grows and differs between sequences; the
    results lie where they lay."""
    comm, tokens = way.comm, 6 * way.comm.size
    q, k, v = random_qkv(tokens, batch=2, heads=4, kv_heads=2)
    layout, mine = parse_layout("interleaved"), slice(comm.rank, None, comm.size)
    own_k, own_v = np.full_like(k[:, mine], np.nan), np.full_like(v[:, mine], np.nan)
    with way.planned(kv_heads=2, batch=2) as decoder:
        buffers = set()
        for length in [*range(1, tokens + 1, 4), 2, 2]:
            lengths = np.array([length, max(length - 2, 0)])
            own = layout.shard_lengths(lengths, tokens, comm.rank, comm.size)
            own_k[:, : own.max()] = k[:, mine][:, : own.max()]
            own_v[:, : own.max()] = v[:, mine][:, : own.max()]
            out, lse = decoder(q, own_k, own_v, lengths=own)
            way.check((out, lse), q, k, v, lengths=lengths)
            buffers.add((out.ctypes.data, lse.ctypes.data))
        assert len(buffers) == 1


@pytest.mark.parametrize("which", ["q", "kv", "qkv"])
def test_bits_of_bfloat16_as_uint16_are_not_taken_for_numbers(way, which):
    """With lengths, so that a ring packs what it sends."""
    _, k, v = random_qkv(9, batch=2, dtype=BFLOAT16, seed=way.comm.rank)
    q, _, _ = random_qkv(0, batch=2, dtype=BFLOAT16)
    raw = [one.view(np.uint16) if name in which else one for name, one in zip("qkv", (q, k, v), strict=True)]
    lengths = np.array([3, 7])
    with way.planned(kv_heads=2, batch=2, dtype="bfloat16") as decoder:
        wanted = copies(decoder(q, k, v, lengths=lengths))
        assert_equal(decoder(*raw, lengths=lengths), wanted)


def test_new_values_in_the_same_arrays_count(way):
    """Strided views that every step must read again, also where a ring packs them."""
    q, k, v = random_qkv(30, batch=2, queries=2, heads=4, kv_heads=4)
    own = own_run(way.comm, 30)
    q_view, v_view = (np.ascontiguousarray(one.swapaxes(1, 2)).swapaxes(1, 2) for one in (q, v[:, own]))
    k_view = np.ascontiguousarray(k[:, own].swapaxes(0, 1)).swapaxes(0, 1)
    with way.planned(batch=2, queries=2) as decoder:
        for _ in range(2):
            way.check(decoder(q_view, k_view, v_view), q, k, v)
            for one in (k, v, k_view, v_view):
                one *= -0.5


@pytest.mark.parametrize(
    "way",
    [pytest.param(name, marks=[pytest.mark.many_ranks] * (name == "hierarchical")) for name in KINDS],
    indirect=True,
)
def test_every_run_gives_the_same_bits_on_sub_communicators(way):
    half = way.comm.Split(way.comm.rank % 2)
    part = Way(half, way.scheme)
    q, k, v = random_qkv(50, heads=8, kv_heads=2, seed=way.comm.rank % 2)
    own, results = own_run(half, 50), set()
    for _ in range(8):
        got = part.decode(q, k[:, own], v[:, own])
        results.add(tuple(one.tobytes() for one in got))
    assert len(results) == 1
    part.check(got, q, k, v)
    half.Free()


@pytest.mark.parametrize("scheme", ["recursive_doubling", "three_allreduce", "kv_ring"])
def test_a_decoder_has_messages_of_its_own(comm, scheme):
    """Its steps and its end are its own where the caller frees the communicator, and makes another."""
    alone = MPI.COMM_SELF.Dup()
    q, k, v = random_qkv(20, heads=4, kv_heads=2, seed=comm.rank)
    shape = {"heads": 4, "kv_heads": 2, "head_dim": q.shape[-1], "dtype": q.dtype, "scheme": scheme}
    with treeattn.Decoder(comm=alone, **shape) as decoder:
        want = decoder(q, k, v)[0].copy()
        alone.Free()
        other = MPI.COMM_WORLD.Dup()
        assert (decoder(q, k, v)[0] == want).all()
    assert other.allreduce(1) == comm.size
    other.Free()


def test_steps_of_several_decoders_stay_apart(way):
    """Two decoders whose steps alternate, and a pending receive of the user, of any tag, on the same
    communicator."""
    comm, received = way.comm, np.full(1, -1)
    pending = comm.Irecv(received, MPI.ANY_SOURCE, MPI.ANY_TAG)
    q, k, v = random_qkv(20, heads=4, kv_heads=4)
    own = own_run(comm, 20)
    with way.planned() as first, way.planned() as second:
        first.local(q, k[:, own], v[:, own])
        second.local(-q, k[:, own], v[:, own])
        second.reduce()
        first.reduce()
        for decoder, sign in ((first, 1), (second, -1)):
            way.check(decoder.finish(), sign * q, k, v)
    assert not pending.Test()
    comm.Barrier()  # nobody sends before everybody has looked
    comm.Send(np.array([comm.rank]), (comm.rank + 1) % comm.size, tag=0)
    pending.Wait()
    assert received[0] == (comm.rank - 1) % comm.size


@pytest.mark.parametrize("half_way", [False, True])
def test_a_decoder_that_was_left_by_an_error_is_closed(way, half_way):
    """Its next step must not give this rank's own part for the whole. A second close is harmless."""
    q, k, v = random_qkv(10)

    def fail(decoder):
        if half_way:
            decoder.local(q, k, v)
            decoder._reducer.start()
        raise KeyError

    with pytest.raises(KeyError), way.planned(kv_heads=2) as decoder:
        fail(decoder)
    for step in (decoder.reduce, *(functools.partial(one, q, k, v) for one in (decoder, decoder.local))):
        with pytest.raises(StateError, match="closed"):
            step()
    decoder.close()


@pytest.mark.parametrize("scheme", sample(6, [*collectives.names("schedule"), "mpi_allreduce"]))
def test_test_brings_a_step_to_its_end(comm, scheme):
    """All rounds, since every rank keeps calling; finish then waits for nobody."""
    q, k, v = random_qkv(12 * comm.size)
    own = own_run(comm, 12 * comm.size)
    with Way(comm, scheme).planned(kv_heads=2) as decoder:
        wanted = copies(decoder(q, k[:, own], v[:, own]))
        decoder.begin(q, k[:, own], v[:, own])
        while not decoder.test():
            pass
        assert decoder.test()
        assert_equal(decoder.finish(), wanted)
