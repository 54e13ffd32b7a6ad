"""Saved caches over MPI: written by some ranks of the job, read by others."""

from __future__ import annotations

import numpy as np
import pytest

from treeattn import Decoder, ShardedCache, reference

PLAN = {"kv_heads": 2, "head_dim": 16, "dtype": "float32"}
TOKENS = np.random.default_rng(1).standard_normal((3, 2, 1, 23, 2, 16)).astype(np.float32)  # layers, k and v


@pytest.fixture
def directory(comm, tmp_path):
    return comm.bcast(tmp_path / "cache")


def test_other_ranks_in_another_layout_go_on(comm, directory):
    """The first ranks of the job write, all of them read, the last of them as well."""
    writers = comm.Split(int(comm.rank > comm.size // 2), comm.rank)
    if comm.rank <= comm.size // 2:
        cache = ShardedCache(writers, capacity=30, layout="zigzag", layers=3, **PLAN)
        for layer, (k, v) in zip(cache.layers, TOKENS, strict=True):
            layer.append(k, v)
        cache.save(directory)
    comm.Barrier()
    writers.Free()
    cache = ShardedCache.load(directory, comm)
    assert cache.totals.tolist() == [23]
    q = np.random.default_rng(2).standard_normal((1, 1, 4, 16)).astype(np.float32)
    with Decoder(comm, heads=4, cache=cache.format, **PLAN) as decoder:
        for layer, (k, v) in zip(cache.layers, TOKENS, strict=True):
            layer.append(k[:, :2], v[:, :2])
            out, _ = decoder(q, layer.shard)
            longer = (np.concatenate([array, array[:, :2]], 1) for array in (k, v))
            wanted, _ = reference.attention(q, *longer, scale=0.25)
            np.testing.assert_allclose(out, wanted, rtol=0, atol=1e-5)
