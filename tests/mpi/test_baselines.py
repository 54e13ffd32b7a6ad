"""The baselines, held to what the schedules are held to."""

from __future__ import annotations

import contextlib
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import treeattn
from tests.support.problems import assert_exact, random_qkv
from tests.support.ranks import assert_same_bits, own_run
from treeattn import files, reference
from treeattn.backends.cpu import MergeOperator
from treeattn.baselines import BASELINES
from treeattn.collectives.runtime.reducer import ReductionSpec
from treeattn.shards import parse_layout

pytestmark = pytest.mark.mpi

DATA = Path(__file__).parent.parent / "data"
REPLICATED = [name for name, row in BASELINES.items() if not row.scattered]
VARIANTS = [*BASELINES, "kv_ring:expanded=yes:rotation=full"]
BFLOAT16 = ml_dtypes.bfloat16
ORDINARY = [(0, np.float32), (0, np.float64), (1, BFLOAT16), (3, np.float16), (3, np.float64)]
ORDINARY += [(257, dtype) for dtype in (np.float32, np.float16, BFLOAT16, np.float64)]


def run(comm, scheme, q, k, v, lengths=None, **options):
    """out and lse of all heads and this rank's slice, whatever the scheme leaves where."""
    heads = slice(None)
    if BASELINES[scheme.partition(":")[0]].scattered:
        count = q.shape[2]
        heads = slice(comm.rank * count // comm.size, (comm.rank + 1) * count // comm.size)
        scheme = treeattn.Reduction(scheme, output="heads")
    out, lse = treeattn.decode(q, k, v, comm=comm, scheme=scheme, lengths=lengths, **options)
    return out, lse, heads


@contextlib.contextmanager
def planned(comm, scheme, **shape):
    """The decoder of a scheme, with the output that it offers."""
    output = "heads" if BASELINES[scheme.partition(":")[0]].scattered else "replicated"
    with treeattn.Decoder(
        comm, **shape, head_dim=64, dtype="float32", scheme=treeattn.Reduction(scheme, output=output)
    ) as decoder:
        yield decoder


@pytest.mark.parametrize("scheme", REPLICATED)
def test_real_cache_matches_independent_expectation(comm, scheme):
    cache = files.open_cache(DATA / "smollm2_layer17_4096.safetensors")
    expected = files.open_cache(DATA / "smollm2_layer17_4096.expected.safetensors")
    runs = parse_layout("contiguous").runs(4096, comm.rank, comm.size)
    k, v = (files.load_runs(cache[name], runs) for name in "kv")
    q, scale = np.array(cache["q"]), cache.scale()
    out, lse = treeattn.decode(q, k, v, comm=comm, scheme=scheme, scale=scale)
    out_bound, lse_bound = reference.error_bounds(comm.allgather(reference.partial(q, k, v, scale=scale)))
    np.testing.assert_allclose(out, np.array(expected["out"]), rtol=0, atol=out_bound)
    np.testing.assert_allclose(lse, np.array(expected["lse"]), rtol=0, atol=lse_bound)
    assert_same_bits(comm, out, lse)


@pytest.mark.parametrize(("tokens", "dtype"), ORDINARY)
@pytest.mark.parametrize("scheme", VARIANTS)
def test_ranks_without_tokens_are_ordinary(comm, scheme, tokens, dtype):
    q, k, v = random_qkv(tokens=tokens, batch=2, queries=3, heads=6, kv_heads=3, dtype=dtype)
    own = own_run(comm, tokens)
    out, lse, heads = run(comm, scheme, q, k[:, own], v[:, own])
    assert out.dtype == lse.dtype == (np.float64 if dtype is np.float64 else np.float32)
    if heads == slice(None):
        assert_same_bits(comm, out, lse)
    k, v = (np.repeat(a, 2, axis=2) for a in (k, v))
    if out.size:
        assert_exact((out, lse), q[:, :, heads], k[:, :, heads], v[:, :, heads], scale=1 / 8)
    if tokens == 0:
        assert not out.any()
        assert (lse == -np.inf).all()


@pytest.mark.parametrize("scheme", VARIANTS)
def test_hostile_values(comm, scheme):
    """Scores of +-1e4, a fully masked row, NaN in one value: exact where defined, spoiled only there."""
    q, k, v = random_qkv(tokens=61, batch=2, heads=4, kv_heads=4, seed=3)
    k[:, ::7] *= 3e3
    lengths = np.array([61, 0])
    own = own_run(comm, 61)
    own_lengths = parse_layout("contiguous").shard_lengths(lengths, 61, comm.rank, comm.size)
    v[0, 60, 2, 5] = np.nan
    out, lse, heads = run(comm, scheme, q, k[:, own], v[:, own], own_lengths)
    assert not out[1].any()
    assert (lse[1] == -np.inf).all()
    for position, head in enumerate(range(4)[heads]):
        here, there = slice(position, position + 1), slice(head, head + 1)
        if head == 2:
            assert np.isnan(out[0, 0, position]).any()
        else:
            arrays = q[:, :, there], k[:, :, there], v[:, :, there]
            assert_exact((out[:, :, here], lse[:, here]), *arrays, scale=1 / 8, lengths=lengths)
    if heads == slice(None):
        assert_same_bits(comm, out, lse)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("scheme", BASELINES)
def test_a_score_that_is_no_number_spoils_its_own_head_only(comm, scheme, value, dtype):
    q, k, v = random_qkv(tokens=40, heads=4, kv_heads=4, seed=4, dtype=dtype)
    k[0, 17, 1, 0] = value if q[0, 0, 1, 0] > 0 else -value
    own = own_run(comm, 40)
    out, lse, heads = run(comm, scheme, q, k[:, own], v[:, own])
    for position, head in enumerate(range(4)[heads]):
        expected = np.isnan if head == 1 else np.isfinite
        assert expected(out[:, :, position]).all()
        assert expected(lse[:, position]).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("scheme", VARIANTS)
def test_a_score_that_is_no_number_spoils_its_head_where_no_other_rank_has_tokens(comm, scheme, value):
    q, k, v = random_qkv(tokens=1, heads=4, kv_heads=4, seed=5)
    k[0, 0, 1, 0] = np.copysign(value, q[0, 0, 1, 0])
    own = own_run(comm, 1)
    out, lse, heads = run(comm, scheme, q, k[:, own], v[:, own])
    spoilt = np.arange(4)[heads] == 1
    assert (np.isnan(out).all(-1) == spoilt).all()
    assert (np.isnan(lse) == spoilt[:, None]).all()


@pytest.mark.parametrize("scheme", BASELINES)
def test_a_step_out_of_order_is_refused(comm, scheme):
    how = treeattn.Reduction(scheme, output="heads" if BASELINES[scheme].scattered else "replicated")
    decoder = treeattn.Decoder(comm, heads=4, kv_heads=2, head_dim=64, dtype="float32", scheme=how)
    decoder.close()
    decoder.close()
    with pytest.raises(treeattn.StateError, match="closed"):
        decoder.reduce()


@pytest.mark.parametrize("scheme", VARIANTS)
def test_decoder_follows_a_growing_cache(comm, scheme):
    """One preallocated array per rank, interleaved tokens, `lengths` grows and differs between sequences."""
    tokens = 6 * comm.size
    q, k, v = random_qkv(tokens=tokens, batch=2, heads=4, kv_heads=2)
    layout, mine = parse_layout("interleaved"), slice(comm.rank, None, comm.size)
    own_k, own_v = np.full_like(k[:, mine], np.nan), np.full_like(v[:, mine], np.nan)
    with planned(comm, scheme, heads=4, kv_heads=2, batch=2) as decoder:
        for length in [*range(1, tokens + 1, 4), 2, 2]:
            lengths = np.array([length, max(length - 2, 0)])
            own = layout.shard_lengths(lengths, tokens, comm.rank, comm.size)
            own_k[:, : own.max()] = k[:, mine][:, : own.max()]
            own_v[:, : own.max()] = v[:, mine][:, : own.max()]
            out, lse = decoder(q, own_k, own_v, lengths=own)
            wide_k, wide_v = (np.repeat(a, 2, axis=2)[:, :, decoder.heads] for a in (k, v))
            if out.size:
                assert_exact((out, lse), q[:, :, decoder.heads], wide_k, wide_v, scale=1 / 8, lengths=lengths)


@pytest.mark.parametrize("which", ["q", "kv", "qkv"])
@pytest.mark.parametrize("scheme", VARIANTS)
def test_bits_of_bfloat16_as_uint16_are_not_taken_for_numbers(comm, scheme, which):
    """With lengths, so that a ring packs what it sends."""
    _, k, v = random_qkv(tokens=9, batch=2, dtype=BFLOAT16, seed=comm.rank)
    q, _, _ = random_qkv(tokens=0, batch=2, dtype=BFLOAT16)
    raw = [a.view(np.uint16) if name in which else a for name, a in zip("qkv", (q, k, v), strict=True)]
    lengths = np.array([3, 7])
    shape = {"batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": "bfloat16"}
    output = "heads" if BASELINES[scheme.partition(":")[0]].scattered else "replicated"
    with treeattn.Decoder(comm, **shape, scheme=treeattn.Reduction(scheme, output=output)) as decoder:
        wanted = [array.copy() for array in decoder(q, k, v, lengths=lengths)]
        found = decoder(*raw, lengths=lengths)
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("scheme", VARIANTS)
def test_new_values_in_the_same_arrays_count(comm, scheme):
    """Strided views that every step must read again, also where a ring packs them."""
    q, k, v = random_qkv(tokens=30, batch=2, queries=2, heads=4, kv_heads=4)
    own = own_run(comm, 30)
    k_view = np.ascontiguousarray(k[:, own].transpose(1, 0, 2, 3)).transpose(1, 0, 2, 3)
    v_view = np.ascontiguousarray(v[:, own].transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    with planned(comm, scheme, heads=4, kv_heads=4, batch=2, queries=2) as decoder:
        for _ in range(2):
            out, lse = decoder(q, k_view, v_view)
            if out.size:
                own_heads = (array[:, :, decoder.heads] for array in (q, k, v))
                assert_exact((out, lse), *own_heads, scale=1 / 8)
            for array in (k, v, k_view, v_view):
                array *= -0.5


@pytest.mark.parametrize("scheme", VARIANTS)
def test_every_run_gives_the_same_bits_on_sub_communicators(comm, scheme):
    half = comm.Split(comm.rank % 2)
    q, k, v = random_qkv(tokens=50, heads=8, kv_heads=2, seed=comm.rank % 2)
    own = own_run(half, 50)
    results = set()
    for _ in range(5):
        out, lse, _ = run(half, scheme, q, k[:, own], v[:, own])
        results.add((out.tobytes(), lse.tobytes()))
    assert len(results) == 1
    half.Free()


@pytest.mark.parametrize("scheme", VARIANTS)
def test_steps_of_several_decoders_stay_apart(comm, scheme):
    """Two decoders whose steps alternate, and a pending receive of the user on the same communicator."""
    received = np.full(1, -1)
    pending = comm.Irecv(received, MPI.ANY_SOURCE, MPI.ANY_TAG)
    q, k, v = random_qkv(tokens=20, heads=4, kv_heads=4)
    own = own_run(comm, 20)
    shape = {"heads": 4, "kv_heads": 4}
    with planned(comm, scheme, **shape) as first, planned(comm, scheme, **shape) as second:
        first.local(q, k[:, own], v[:, own])
        second.local(-q, k[:, own], v[:, own])
        second.reduce()
        first.reduce()
        for decoder, sign in ((first, 1), (second, -1)):
            out, lse = decoder.finish()
            if out.size:
                heads = decoder.heads
                assert_exact((out, lse), sign * q[:, :, heads], k[:, :, heads], v[:, :, heads], scale=1 / 8)
    assert not pending.Test()
    comm.Barrier()  # nobody sends before everybody has looked
    comm.Send(np.array([comm.rank]), (comm.rank + 1) % comm.size, tag=0)
    pending.Wait()


@pytest.mark.parametrize("expanded", ["no", "yes"])
@pytest.mark.parametrize("rotation", ["partial", "full"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kv_ring_sends_what_equation_10_says(comm, rotation, expanded, dtype):
    """2 b t d elements per hop, with the hops and the KV heads of the variant."""
    batch, tokens, heads, kv_heads, head_dim = 3, 5, 6, 2, 64
    hops = comm.size if rotation == "full" else comm.size - 1
    d = head_dim * (heads if expanded == "yes" else kv_heads)
    scheme = f"kv_ring:expanded={expanded}:rotation={rotation}"
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "batch": batch, "dtype": dtype}
    element = np.dtype(treeattn.attention.shape.DTYPES[dtype])
    q = np.ones((batch, 1, heads, head_dim), element)
    k = np.ones((batch, tokens, kv_heads, head_dim), element)
    with treeattn.Decoder(comm, **shape, scheme=scheme) as decoder:
        decoder(q, k, k)
        assert totals(decoder.sent) == (2 * hops, 2 * batch * tokens * d * hops * element.itemsize)
        assert {destination for destination, _ in decoder.sent} <= {(comm.rank + 1) % comm.size}
        decoder(q, k[:, :0], k[:, :0])
        assert totals(decoder.sent) == (0, 0)


def test_keys_and_values_beyond_the_largest_message_go_in_parts(comm, monkeypatch):
    monkeypatch.setattr("treeattn.baselines.kv_ring.LARGEST_MESSAGE", 1000)
    q, k, v = random_qkv(tokens=9 * comm.size, heads=4, kv_heads=2)
    own = own_run(comm, 9 * comm.size)
    with treeattn.Decoder(
        comm, heads=4, kv_heads=2, head_dim=64, dtype="float32", scheme="kv_ring:rotation=full"
    ) as decoder:
        out, lse = decoder(q, k[:, own], v[:, own])
        assert_exact((out, lse), q, np.repeat(k, 2, axis=2), np.repeat(v, 2, axis=2), scale=1 / 8)
        size = 9 * 2 * 64 * 4
        assert totals(decoder.sent) == (2 * comm.size * -(-size // 1000), 2 * comm.size * size)
        assert max(length for _, length in decoder.sent) == 1000


def totals(sent):
    """(messages, bytes)"""
    return len(sent), sum(size for _, size in sent)


def test_other_baselines_say_what_they_send(comm):
    p, heads = comm.size, 2 * comm.size
    q, k, v = random_qkv(tokens=10, heads=heads, kv_heads=heads, batch=3)
    sent = {}
    for scheme in BASELINES:
        with planned(comm, scheme, heads=heads, kv_heads=heads, batch=3) as decoder:
            decoder(q, k, v)
            sent[scheme] = decoder.sent
    records = 3 * heads * (64 + 2) * 4
    assert totals(sent["query_ring"]) == (2 * (p - 1), 2 * (p - 1) * records // p)  # equation 14
    assert sent["three_allreduce"] == sent["two_allreduce"] == (None, records)
    assert sent["head_all_to_all"] == (None, records * (p - 1) // p)


def test_slices_without_heads_are_not_sent(comm):
    """More ranks than KV heads: as many slices travel as there are heads."""
    q, k, v = random_qkv(tokens=10, heads=2, kv_heads=1)
    with planned(comm, "query_ring", heads=2, kv_heads=1) as decoder:
        decoder(q, k, v)
        messages, size = totals(decoder.sent)
        assert size == messages * 2 * (64 + 2) * 4
        assert comm.allreduce(messages) == 2 * (comm.size - 1)


@pytest.mark.parametrize("scheme", ["kv_ring", "query_ring"])
def test_a_ring_needs_the_arrays_of_each_step(comm, scheme):
    """`local` takes them and sends nothing: the last ones count, and for one step."""
    q, k, v = random_qkv(tokens=10)
    with planned(comm, scheme, heads=4, kv_heads=2) as decoder:
        for _ in range(2):
            with pytest.raises(treeattn.StateError, match="local.. comes before reduce"):
                decoder.reduce()
            if comm.rank == 0:
                decoder.local(-q, k, v)
            decoder.local(q, k, v)
            decoder.reduce()
        with pytest.raises(treeattn.ArgumentError, match="lengths"):
            decoder.local(q, k, v, lengths=np.array([11]))
        decoder.local(q, k, v)
        decoder._reducer.start()
        with pytest.raises(treeattn.StateError, match="already running"):
            decoder.local(q, k, v)
        decoder._reducer.wait()


@pytest.mark.parametrize("scheme", [*BASELINES])
def test_closing_ends_a_step_in_flight(comm, scheme):
    q, k, v = random_qkv(tokens=10)
    with planned(comm, scheme, heads=4, kv_heads=2) as decoder:
        decoder.local(q, k, v)
        decoder._reducer.start()


@pytest.mark.parametrize("name", ["three_allreduce", "two_allreduce", "head_all_to_all"])
def test_collectives_start_and_wait(comm, name):
    def reducer_of(buffer):
        return BASELINES[name].plan(ReductionSpec(comm, MergeOperator(64), buffer))

    mine = np.full((comm.size, 66), comm.rank, np.float32)
    once, twice = mine.copy(), mine.copy()
    with reducer_of(once) as one, reducer_of(twice) as other:
        one()
        other.start()
        with pytest.raises(treeattn.StateError, match="already running"):
            other()
        other.wait()
        with pytest.raises(treeattn.StateError, match="without start"):
            other.wait()
    np.testing.assert_allclose(once, twice, rtol=1e-6)
    with pytest.raises(treeattn.ScheduleError, match="C-contiguous"):
        reducer_of(mine.astype(np.float64))


@pytest.mark.parametrize("half_way", [False, True])
@pytest.mark.parametrize("scheme", BASELINES)
def test_a_decoder_that_was_left_by_an_error_is_closed(comm, scheme, half_way):
    q, k, v = random_qkv(tokens=10)

    def fail(decoder):
        if half_way:
            decoder.local(q, k, v)
            decoder._reducer.start()
        raise KeyError

    with pytest.raises(KeyError), planned(comm, scheme, heads=4, kv_heads=2) as decoder:
        fail(decoder)
    with pytest.raises(treeattn.StateError, match="closed"):
        decoder.reduce()
    with pytest.raises(treeattn.StateError, match="closed"):
        decoder(q, k, v)
