"""Caches of another type than the query, over ranks: float8 with scales, its bits, and the errors."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import treeattn
from tests.support import problems
from tests.support.problems import random_qkv
from tests.support.ranks import own_run

pytestmark = pytest.mark.mpi


def shards(comm, stored, tokens=150):
    q, k, v = random_qkv(tokens, batch=2, seed=7)
    k, v, own = k.astype(stored), v.astype(stored), own_run(comm, tokens)
    return q, k, v, k[:, own], v[:, own]


def assert_exact(got, q, k, v, k_scale=1.0, v_scale=1.0):
    scales = (np.broadcast_to(one, 2)[:, None] for one in (k_scale, v_scale))
    wide = [array.astype(np.float64) * one for array, one in zip((k, v), scales, strict=True)]
    problems.assert_exact(got, q, *wide, scale=0.125)


@pytest.mark.parametrize(
    ("name", "scales"),
    [
        ("float8_e4m3fn", (0.5, 2.0)),
        ("float8_e5m2", ([0.5, 1.5], [2.0, 0.25])),
        ("float8_e4m3fn", (np.array([0.5, 2], ml_dtypes.bfloat16), np.float16(3))),
    ],
)
def test_decode_and_decoder(comm, name, scales):
    k_scale, v_scale = scales
    q, k, v, own_k, own_v = shards(comm, getattr(ml_dtypes, name))
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    once = [array.copy() for array in treeattn.decode(q, treeattn.Shard(own_k, own_v, **scales), comm=comm)]
    assert_exact(once, q, k, v, k_scale, v_scale)
    bits = own_k.view(np.uint8), own_v.view(np.uint8)
    plan = {"heads": 4, "kv_heads": 2, "head_dim": 64, "batch": 2, "dtype": "float32"}
    with treeattn.Decoder(comm, **plan, cache=treeattn.CacheFormat(dtype=name, **scales)) as decoder:
        for arrays in ((own_k, own_v), bits, (own_k.copy(), own_v.copy())):
            for _ in range(2):
                for ours, theirs in zip(decoder(q, *arrays), once, strict=True):
                    assert ours.tobytes() == theirs.tobytes()
    shard = treeattn.Shard(*bits, dtype=name, **scales)
    for ours, theirs in zip(treeattn.decode(q, shard, comm=comm), once, strict=True):
        assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16])
def test_a_cache_of_16_bits_under_a_query_of_32(comm, stored):
    q, k, v, own_k, own_v = shards(comm, stored)
    assert_exact(treeattn.decode(q, own_k, own_v, comm=comm), q, k, v)
