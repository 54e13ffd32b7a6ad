"""A cache in pages over ranks: whose page it is does not matter, and what cannot be is raised by all."""

from __future__ import annotations

import numpy as np
import pytest

import treeattn
from tests.support import arguments
from tests.support.pages import in_pages
from treeattn import reference
from treeattn.errors import ArgumentError

pytestmark = pytest.mark.mpi
PAGE_SIZE = 8


def pool_of(lengths, seed=0, spare=3):
    """q, and a pool of pages over all ranks with its block table; tokens are also given in a row."""
    rng = np.random.default_rng(seed)
    batch, tokens = len(lengths), max(lengths)
    q = rng.standard_normal((batch, 2, 4, 64)).astype(np.float32)
    k, v = (rng.standard_normal((batch, tokens, 2, 64)).astype(np.float32) for _ in "kv")
    (k_pool, table), (v_pool, _) = (in_pages(one, PAGE_SIZE, lengths) for one in (k, v))
    return q, (k, v), (k_pool, v_pool), table


def owned(table, owners, rank, lengths):
    """(lengths, positions, block table) of a rank's pages, at the same places in each sequence."""
    place, held = np.arange(table.shape[1]), np.flatnonzero(owners == rank)
    valid = np.clip(np.asarray(lengths)[:, None] - place * PAGE_SIZE, 0, PAGE_SIZE)
    own = (valid > 0) & np.isin(table, held)
    places = np.flatnonzero(own.any(axis=0))
    numbers = np.where(own, np.searchsorted(held, table), -1)[:, places]
    return (valid * own).sum(axis=1), [(int(p) * PAGE_SIZE, 1, PAGE_SIZE) for p in places], numbers


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"causal": True, "window": (20, None), "leading": 3},
        {"alibi": [0.1, -0.1, 0.5, 0.0], "softcap": 5.0, "sink_logits": [1.0, 0.0, -1.0, 0.5]},
    ],
)
def test_any_owner_map_gives_the_same_attention(comm, rules):
    """One sequence, of which every rank has any pages, or none."""
    for seed in range(4):
        rng = np.random.default_rng(seed)
        q, (k, v), pool, table = pool_of([90 + seed], seed)
        owners = rng.integers(0, comm.size, len(pool[0]))
        counts, positions, numbers = owned(table, owners, comm.rank, [90 + seed])
        stands = np.array([90 + seed - 1, 40])
        shard = [one[owners == comm.rank] for one in pool]
        held = treeattn.Shard(*shard, counts, positions, numbers)
        given = {"q_positions": stands, "rules": treeattn.Rules(**rules)}
        out, lse = treeattn.decode(q, held, comm=comm, **given)
        names = [name for name in ("causal", "window", "leading") if name in rules]
        seen = reference.seen(np.arange(k.shape[1]), stands[None], **{name: rules[name] for name in names})
        distance = np.broadcast_to(stands[None, :, None] - np.arange(k.shape[1]), seen.shape)
        wanted_out, wanted_lse = reference.attention(
            *(q, k, v),
            scale=0.125,
            seen=np.broadcast_to(seen, (1, 2, k.shape[1])),
            softcap=rules.get("softcap"),
            alibi=rules.get("alibi"),
            distance=distance,
            sinks=rules.get("sink_logits"),
        )
        np.testing.assert_allclose(out, wanted_out, rtol=0, atol=1e-5)
        np.testing.assert_allclose(lse, wanted_lse, rtol=0, atol=3e-5)
        everyone = comm.allgather(out.tobytes() + lse.tobytes())
        assert everyone == [everyone[0]] * comm.size


def test_a_decoder_whose_sequences_grow_by_pages(comm):
    """Page p of each sequence on rank p mod size; the bits are those of the same tokens in a row."""
    rng = np.random.default_rng(1)
    totals = np.array([70, 33])
    q, _, pool, table = pool_of(totals.tolist(), 1)
    place = np.arange(table.shape[1])
    owners = np.zeros(len(pool[0]), np.int64)
    for row in table:
        owners[row[row >= 0]] = place[row >= 0] % comm.size
    shard = [one[owners == comm.rank] for one in pool]
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 64, "batch": 2, "queries": 2, "dtype": "float32"}
    with (
        treeattn.Decoder(
            comm, **shape, cache=treeattn.CacheFormat(page_size=PAGE_SIZE), rules=treeattn.Rules(causal=True)
        ) as paged,
        treeattn.Decoder(comm, **shape, rules=treeattn.Rules(causal=True)) as plain,
    ):
        for lengths in ([1, 1], [8, 9], [17, 9], [64, 30], [70, 33]):
            counts, positions, numbers = owned(table, owners, comm.rank, lengths)
            stands = np.array([[total - 1, rng.integers(total)] for total in lengths])
            held = treeattn.Shard(*shard, counts, positions, numbers)
            out, lse = paged(q, held, q_positions=stands)
            row = [one[np.maximum(numbers, 0)].reshape(2, -1, 2, 64) for one in shard]
            if numbers.shape[1] == 0:
                row = [np.zeros((2, 0, 2, 64), np.float32)] * 2
            wanted = plain(q, treeattn.Shard(*row, counts, positions), q_positions=stands)
            assert (out.tobytes(), lse.tobytes()) == tuple(array.tobytes() for array in wanted)


def test_a_decoder_takes_pages_if_it_is_planned_for_them(comm):
    one, table = np.ones((1, 1, 1, 8), np.float32), np.zeros((1, 1), np.int32)
    shape = {"heads": 1, "kv_heads": 1, "head_dim": 8, "dtype": "float32"}
    for rules in (None, treeattn.Rules(softcap=3.0)):
        with treeattn.Decoder(comm, **shape, rules=rules) as decoder:
            step = decoder.local
            with pytest.raises(
                ArgumentError, match=r"page_size=None: plan with cache=CacheFormat\(page_size="
            ):
                step(one, treeattn.Shard(one, one, [1], block_table=table))
        cache = treeattn.CacheFormat(page_size=1)
        with treeattn.Decoder(comm, **shape, cache=cache, rules=rules) as decoder:
            step = decoder.local
            with pytest.raises(ArgumentError, match=r"page_size=1: pass Shard\(block_table="):
                step(one, one, one, [1])
            with pytest.raises(ArgumentError, match=r"expected \[pages, page_size, kv_heads, head_dim\]"):
                step(one, treeattn.Shard(one[:, :0], one[:, :0], [1], block_table=table))
            with pytest.raises(ArgumentError, match="needs lengths="):
                step(one, treeattn.Shard(one, one, block_table=table))


@pytest.mark.parametrize("cache", ["float64", "float8_e5m2", "latent"])
def test_pages_of_other_caches(comm, cache):
    """Of types of their own, of latent heads: the bits of the same tokens in a row."""
    rng = np.random.default_rng(comm.rank)
    dtype = "float32" if cache == "latent" else cache
    k = rng.standard_normal((2, 30, 1, 64)).astype(treeattn.attention.shape.CACHE_DTYPES[dtype])
    q = np.random.default_rng(0).standard_normal((2, 1, 4, 64))
    q = q.astype(np.float64 if cache == "float64" else np.float32)
    lengths = np.array([30, 11])
    plan = {"heads": 4, "kv_heads": 1, "head_dim": 64, "batch": 2, "dtype": str(q.dtype), "scale": 0.1}
    if dtype.startswith("float8"):
        plan |= {"cache_dtype": dtype, "k_scale": 0.5, "v_scale": 2.0}
    if cache == "latent":
        plan |= {"v_dim": 48}
    pages, table = in_pages(k, PAGE_SIZE, lengths)
    found = []
    for array, page_size in ((k, None), (pages, PAGE_SIZE)):
        with treeattn.Decoder(comm, **arguments.plan(**plan, page_size=page_size)) as decoder:
            values = None if cache == "latent" else array
            shard = treeattn.Shard(array, values, lengths, block_table=None if page_size is None else table)
            found.append([one.tobytes() for one in decoder(q, shard)])
    assert found[0] == found[1]
