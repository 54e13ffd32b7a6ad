"""Caches of another type than the query, over ranks: float8 with scales, its bits, and the errors."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import treeattn
from treeattn import reference
from treeattn.errors import ArgumentError, RestrictionError

pytestmark = pytest.mark.mpi


def shards(comm, stored, tokens=150):
    rng = np.random.default_rng(7)
    q = rng.standard_normal((2, 1, 4, 64)).astype(np.float32)
    k, v = (rng.standard_normal((2, tokens, 2, 64)).astype(stored) for _ in "kv")
    own = slice(comm.rank * tokens // comm.size, (comm.rank + 1) * tokens // comm.size)
    return q, k, v, k[:, own], v[:, own]


def assert_exact(got, q, k, v, k_scale=1.0, v_scale=1.0):
    scales = (np.broadcast_to(one, 2)[:, None] for one in (k_scale, v_scale))
    wide = [array.astype(np.float64) * one for array, one in zip((k, v), scales, strict=True)]
    part = reference.partial(q, *wide, scale=0.125)
    for ours, exact, bound in zip(
        got, reference.combine([part]), reference.error_bounds([part]), strict=True
    ):
        np.testing.assert_allclose(ours, exact, rtol=0, atol=bound)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize(
    "scales", [(0.5, 2.0), ([0.5, 1.5], [2.0, 0.25]), (np.array([0.5, 2], ml_dtypes.bfloat16), np.float16(3))]
)
def test_decode_and_decoder(comm, name, scales):
    k_scale, v_scale = scales
    q, k, v, own_k, own_v = shards(comm, getattr(ml_dtypes, name))
    given = {"comm": comm, "k_scale": k_scale, "v_scale": v_scale}
    once = [array.copy() for array in treeattn.decode(q, own_k, own_v, **given)]
    assert_exact(once, q, k, v, k_scale, v_scale)
    bits = own_k.view(np.uint8), own_v.view(np.uint8)
    plan = {"heads": 4, "kv_heads": 2, "head_dim": 64, "batch": 2, "dtype": "float32"}
    with treeattn.Decoder(**given, **plan, cache_dtype=name) as decoder:
        for arrays in ((own_k, own_v), bits, (own_k.copy(), own_v.copy())):
            for _ in range(2):
                for ours, theirs in zip(decoder(q, *arrays), once, strict=True):
                    assert ours.tobytes() == theirs.tobytes()
    for ours, theirs in zip(treeattn.decode(q, *bits, cache_dtype=name, **given), once, strict=True):
        assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16])
def test_a_cache_of_16_bits_under_a_query_of_32(comm, stored):
    q, k, v, own_k, own_v = shards(comm, stored)
    assert_exact(treeattn.decode(q, own_k, own_v, comm=comm), q, k, v)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"k_scale": None}, "a cache of float8_e5m2 needs k_scale: a number, or one for each KV head"),
        ({"v_scale": [1.0, 2.0, 3.0]}, "v_scale must be a number, or one for each of 2 KV heads"),
        ({"v_scale": np.nan}, "v_scale must be finite and above 0"),
        ({"stored": np.float16}, "k_scale is for caches of float8_e4m3fn and float8_e5m2, not of float16"),
        ({"stored": np.uint8}, "uint8 arrays carry float8 bits: say of which, cache_dtype="),
        ({"stored": np.int8}, "arrays of int8 are not supported"),
        ({"stored": np.float64}, "k and v are float64, but q is float32"),
        (
            {"cache_dtype": "float8_e4m3fn"},
            "dtype='float8_e4m3fn' was asked for, but the array is float8_e5m2",
        ),
    ],
)
def test_what_cannot_be_is_one_line_on_all_ranks(comm, changed, message):
    given = {"k_scale": 1.0, "v_scale": 1.0, "comm": comm} | changed
    stored = given.pop("stored", ml_dtypes.float8_e5m2)
    q, _, _, k, v = shards(comm, np.float32)
    with pytest.raises(ArgumentError, match=message):
        treeattn.decode(q, k.astype(stored), v.astype(stored), **given)


@pytest.mark.parametrize("how", [{"scheme": "kv_ring"}, {"groups": 2}])
def test_places_that_know_one_type_refuse_two(comm, how):
    with pytest.raises(RestrictionError, match="takes q, k and v of one type"):
        treeattn.Decoder(comm, heads=2, kv_heads=2, head_dim=8, dtype="float32", cache_dtype="float16", **how)


def test_ranks_that_scale_differently_are_told(comm):
    if comm.size == 1:
        pytest.skip("one rank cannot contradict itself")
    plan = {"heads": 2, "kv_heads": 2, "head_dim": 8, "cache_dtype": "float8_e5m2", "v_scale": 1.0}
    with pytest.raises(ArgumentError, match="k_scale"):
        treeattn.Decoder(comm, **plan, k_scale=1.0 + comm.rank)
