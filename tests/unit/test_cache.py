"""The sharded cache, one object for each rank of a job that this process plays alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.drawn import examples
from treeattn import cache as cache_module
from treeattn.cache import ShardedCache
from treeattn.errors import ArgumentError
from treeattn.token_tree import TokenTree

HEADS, DIM = 2, 8


class Ranks:
    """Enough of a communicator for planning: everyone passes the same."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size

    def allgather(self, mine):
        return [mine] * self.size


def caches(size, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_module.communicators, "intracomm", lambda comm: comm)
        plan = {"kv_heads": HEADS, "head_dim": DIM, "dtype": "float32", **options}
        return [ShardedCache(Ranks(rank, size), **plan) for rank in range(size)]


def tokens(draw, batch, count):
    return draw.standard_normal((2, batch, count, HEADS, DIM)).astype(np.float32)


def gathered(shards, row):
    """Keys and values of a sequence, put together again from all shards by their positions."""
    total = int(shards[0].totals[row])
    whole = np.full((2, total, HEADS, DIM), np.nan, np.float32)
    for shard in shards:
        valid = shard.lengths[row]
        there = shard.positions.positions(0, valid)
        assert np.isnan(whole[:, there]).all()  # nobody else has them
        whole[:, there] = shard.k[row, :valid], shard.v[row, :valid]
    assert not np.isnan(whole).any()
    return whole


LAYOUTS = st.sampled_from(["contiguous", "interleaved", "zigzag", "sizes", "owners"])


def layout_of(kind, size, capacity, draw):
    if kind == "owners":
        return draw.integers(0, size, capacity)
    if kind == "sizes":
        cuts = np.sort(draw.integers(0, capacity + 1, size - 1))
        return "sizes=" + ",".join(map(str, np.diff([0, *cuts, capacity])))
    return kind


@examples(150)
@given(LAYOUTS, st.integers(1, 8), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_what_was_put_in_comes_out(kind, size, batch, seed):
    """Appended, proposed, committed, taken back: the shards together are always the whole sequences."""
    draw = np.random.default_rng(seed)
    capacity = int(draw.integers(1, 40))
    shards = caches(
        size, batch=batch, capacity=capacity, drafts=9, layout=layout_of(kind, size, capacity, draw)
    )
    whole = [np.zeros((2, 0, HEADS, DIM), np.float32) for _ in range(batch)]
    arrays = [(shard.k, shard.v, shard.lengths) for shard in shards]
    for _ in range(12):
        room = capacity - shards[0].totals
        action = draw.integers(4)
        if action == 0:
            counts = draw.integers(0, np.minimum(room, 7) + 1)
            k, v = tokens(draw, batch, int(counts.max()))
            for shard in shards:
                shard.append(k, v, counts)
            for row, count in enumerate(counts):
                whole[row] = np.concatenate([whole[row], np.stack([k, v])[:, row, :count]], 1)
        elif action == 1:
            tree = TokenTree.from_beams(draw.integers(0, 2, (batch, 3, 3)))
            k, v = tokens(draw, batch, tree.nodes)
            slots = [
                tree.path(row, int(draw.integers(tree.lengths[row])))[: room[row]] for row in range(batch)
            ]
            path = np.full((batch, 4), -1)
            for row, kept in enumerate(slots):
                path[row, : len(kept)] = kept
            before = [shard.k.copy() for shard in shards]
            lengths = [shard.lengths.copy() for shard in shards]
            for shard in shards:
                shard.propose(k, v, tree)
                shard.commit(path)
            for row, kept in enumerate(slots):
                whole[row] = np.concatenate([whole[row], np.stack([k, v])[:, row, kept]], 1)
            for shard, old, length in zip(shards, before, lengths, strict=True):
                for row in range(batch):  # nothing of the context moved
                    np.testing.assert_array_equal(shard.k[row, : length[row]], old[row, : length[row]])
        elif action == 2:
            back = draw.integers(0, shards[0].totals + 1)
            for shard in shards:
                shard.rollback(back)
            whole = [rows[:, :total] for rows, total in zip(whole, back, strict=True)]
        else:
            counts = draw.integers(0, np.minimum(room, 7) + 1)
            k, v = tokens(draw, batch, int(counts.max()))
            for shard in shards:
                mine = [
                    np.flatnonzero(shard.owners(shard.totals[row] + np.arange(count)) == shard.rank)
                    for row, count in enumerate(counts)
                ]
                own = np.zeros((2, batch, max(map(len, mine)), HEADS, DIM), np.float32)
                for row, chosen in enumerate(mine):
                    own[:, row, : len(chosen)] = k[row, chosen], v[row, chosen]
                shard.append_own(*own, counts)
            for row, count in enumerate(counts):
                whole[row] = np.concatenate([whole[row], np.stack([k, v])[:, row, :count]], 1)
        for row in range(batch):
            np.testing.assert_array_equal(gathered(shards, row), whole[row])
        everyone = np.array([shard.lengths for shard in shards])
        assert all((shard.shard_lengths == everyone).all() for shard in shards)
    for shard, (k, v, lengths) in zip(shards, arrays, strict=True):
        assert [shard.k is k, shard.v is v, shard.lengths is lengths] == [True] * 3


def test_drafts_stand_where_their_depth_says():
    (shard,) = caches(1, batch=2, capacity=10, drafts=4)
    shard.append(*np.zeros((2, 2, 3, HEADS, DIM), np.float32), counts=[3, 1])
    tree = TokenTree.from_parents([[1, 2, 3, 4]] * 2, [[-1, 0, 0, 1]] * 2, [4, 1])
    assert shard.draft_positions(tree).tolist() == [[3, 4, 4, 5], [1, 1, 1, 1]]


def test_an_error_changes_nothing():
    (shard,) = caches(1, capacity=4, drafts=3)
    k, v = np.ones((2, 1, 3, HEADS, DIM), np.float32)
    tree = TokenTree.chain([[1, 2, 3]])
    shard.append(k, v)
    shard.propose(k, v, tree)
    for wrong in ([[0, 1]], [[1]], [[0, -1, 1]], [[0, 2]]):
        with pytest.raises(ArgumentError):
            shard.commit(wrong)
    shard.commit([[0]])
    assert (shard.totals.tolist(), shard.lengths.tolist()) == ([4], [4])


ROWS = np.zeros((1, 2, HEADS, DIM), np.float32)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda shard: shard.append(ROWS, ROWS[:, :1]), "alike for k and v"),
        (lambda shard: shard.append(ROWS[..., :4], ROWS[..., :4]), "= [1, any, 2, 8] is needed"),
        (lambda shard: shard.append(ROWS.astype(int), ROWS), "k is int64, the cache holds float32"),
        (lambda shard: shard.append(ROWS, ROWS, [3]), "1 whole numbers from 0 to 2"),
        (lambda shard: shard.append(ROWS, ROWS, [0.5]), "whole numbers"),
        (lambda shard: [shard.append(ROWS, ROWS) for _ in range(3)], "exceed the capacity of 5"),
        (lambda shard: shard.append_own(ROWS, ROWS, [3]), "of the next [3], 3 are this rank's"),
        (lambda shard: shard.propose(ROWS, ROWS, TokenTree.chain([[1], [2]])), "2 rows, the cache 1"),
        (lambda shard: shard.propose(ROWS, ROWS, TokenTree.chain([[1]])), "a tree of 1 slots"),
        (lambda shard: shard.propose(ROWS, ROWS, TokenTree.chain([[1, 2]])), "at most drafts=1"),
        (lambda shard: shard.commit([[0]]), "propose them first"),
        (lambda shard: shard.rollback([1]), "from 0 to [0] are there"),
        (lambda shard: shard.rollback([[1], [0, 1]]), "totals: no array of whole numbers"),
        (lambda shard: shard.owners([5]), "room for 5"),
        (lambda shard: shard.owners([-1, 2]), "position -1"),
        (lambda shard: shard.owners([0.5]), "positions of float64: whole numbers"),
    ],
)
def test_what_does_not_fit(call, words):
    (shard,) = caches(1, capacity=5, drafts=1)
    with pytest.raises(ArgumentError) as raised:
        call(shard)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_keeping_nothing_forgets_the_drafts():
    (shard,) = caches(1, capacity=5, drafts=2)
    shard.propose(ROWS, ROWS, TokenTree.chain([[1, 2]]))
    shard.commit([[]])
    assert shard.totals.tolist() == [0]
    with pytest.raises(ArgumentError, match="propose them first"):
        shard.commit([[0]])


def test_a_path_that_is_none():
    (shard,) = caches(1, capacity=5, drafts=3)
    tree = TokenTree.from_parents([[1, 2, 3]], [[-1, 0, 0]])
    shard.propose(*np.zeros((2, 1, 3, HEADS, DIM), np.float32), tree)
    for path, words in (
        ([[1]], "is no path of row 0"),
        ([[0, 1, 2]], "is no path of row 0"),
        ([[0, -1, 1]], "and then nothing but -1"),
        ([0], "for each of 1 rows"),
        ([[0.0]], "path of float64: whole numbers"),
        ([[0], [0, 1]], "path: no array of whole numbers"),
    ):
        with pytest.raises(ArgumentError) as raised:
            shard.commit(path)
        assert words in str(raised.value)
    shard.rollback()
    with pytest.raises(ArgumentError, match="propose them first"):
        shard.commit([[0]])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"capacity": 0}, "capacity must be a whole number, at least 1"),
        ({"capacity": 2.0}, "capacity must be"),
        ({"drafts": -1}, "drafts must be"),
        ({"layout": "sizes=1,1"}, "adds up to 2 tokens"),
        ({"layout": "round"}, "unknown layout"),
        ({"layout": [0, 1, 2, 0]}, "the rank (0 to 1) of each of 4 positions"),
        ({"layout": [0, 1]}, "each of 4 positions"),
        ({"head_dim": 7}, "head_dim 7"),
    ],
)
def test_what_cannot_be_planned(options, words):
    with pytest.raises(ArgumentError) as raised:
        caches(2, **{"capacity": 4, **options})
    assert words in str(raised.value)
