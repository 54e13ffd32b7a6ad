"""The baselines, held to what the schedules are held to."""

from __future__ import annotations

import hashlib
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import treeattn
from treeattn import files, reference
from treeattn.baselines import BASELINES
from treeattn.shards import parse_layout

pytestmark = pytest.mark.mpi

DATA = Path(__file__).parent.parent / "data"
REPLICATED = [name for name, row in BASELINES.items() if not row.scattered]
DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16, np.float64]


def made_up(*, tokens, batch=1, queries=1, heads=4, kv_heads=2, head_dim=64, dtype=np.float32, seed=0):
    """(q, k, v), whole: the same arrays on every rank."""
    draw = np.random.default_rng(seed)
    q = draw.standard_normal((batch, queries, heads, head_dim)).astype(dtype)
    k = draw.standard_normal((batch, tokens, kv_heads, head_dim)).astype(dtype)
    v = draw.standard_normal((batch, tokens, kv_heads, head_dim)).astype(dtype)
    return q, k, v


def shard(comm, tokens, layout="contiguous"):
    (run,) = parse_layout(layout).runs(tokens, comm.rank, comm.size)
    return run


def run(comm, scheme, q, k, v, lengths=None, **options):
    """out and lse of all heads and this rank's slice, whatever the scheme leaves where."""
    heads = slice(None)
    if BASELINES[scheme.partition(":")[0]].scattered:
        count = q.shape[2]
        heads = slice(comm.rank * count // comm.size, (comm.rank + 1) * count // comm.size)
        options["output"] = "heads"
    out, lse = treeattn.decode(q, k, v, comm=comm, scheme=scheme, lengths=lengths, **options)
    return out, lse, heads


def assert_same_bits(comm, *arrays):
    digest = hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()
    assert comm.allgather(digest) == [digest] * comm.size


def assert_exact(q, k, v, out, lse, lengths=None, scale=1 / 8):
    whole = reference.partial(q, k, v, scale=scale, lengths=lengths)
    out_bound, lse_bound = reference.error_bounds([whole])
    wanted_out, wanted_lse = reference.combine([whole])
    np.testing.assert_allclose(out, wanted_out, rtol=0, atol=out_bound)
    np.testing.assert_allclose(lse, wanted_lse, rtol=0, atol=lse_bound)


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 3, 257])
@pytest.mark.parametrize("scheme", BASELINES)
def test_ranks_without_tokens_are_ordinary(comm, scheme, tokens, dtype):
    q, k, v = made_up(tokens=tokens, batch=2, queries=3, heads=6, kv_heads=3, dtype=dtype)
    own = shard(comm, tokens)
    out, lse, heads = run(comm, scheme, q, k[:, own], v[:, own])
    assert out.dtype == lse.dtype == (np.float64 if dtype is np.float64 else np.float32)
    k, v = (np.repeat(a, 2, axis=2) for a in (k, v))
    if out.size:
        assert_exact(q[:, :, heads], k[:, :, heads], v[:, :, heads], out, lse)
    if tokens == 0:
        assert not out.any()
        assert (lse == -np.inf).all()


@pytest.mark.parametrize("scheme", BASELINES)
def test_hostile_values(comm, scheme):
    """Scores of +-1e4, a fully masked row, NaN in one value: exact where defined, spoiled only there."""
    q, k, v = made_up(tokens=61, batch=2, heads=4, kv_heads=4, seed=3)
    k[:, ::7] *= 3e3
    lengths = np.array([61, 0])
    own = shard(comm, 61)
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
            assert_exact(*arrays, out[:, :, here], lse[:, here], lengths)
    if scheme in REPLICATED:
        np.testing.assert_array_equal(*(np.isnan(a) for a in (out, comm.bcast(out))))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("scheme", BASELINES)
def test_a_score_that_is_no_number_spoils_its_own_head_only(comm, scheme, value, dtype):
    q, k, v = made_up(tokens=40, heads=4, kv_heads=4, seed=4, dtype=dtype)
    k[0, 17, 1, 0] = value if q[0, 0, 1, 0] > 0 else -value
    own = shard(comm, 40)
    out, lse, heads = run(comm, scheme, q, k[:, own], v[:, own])
    for position, head in enumerate(range(4)[heads]):
        expected = np.isnan if head == 1 else np.isfinite
        assert expected(out[:, :, position]).all()
        assert expected(lse[:, position]).all()


@pytest.mark.parametrize("scheme", BASELINES)
def test_a_step_out_of_order_is_refused(comm, scheme):
    options = {"output": "heads"} if BASELINES[scheme].scattered else {}
    decoder = treeattn.Decoder(
        comm, heads=4, kv_heads=2, head_dim=64, dtype="float32", scheme=scheme, **options
    )
    decoder.close()
    decoder.close()
    with pytest.raises(treeattn.ScheduleError, match="closed"):
        decoder.reduce()
