"""The sharded cache, one object for each rank of a job that this process plays alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.caches import DIM, HEADS, LAYOUTS, Plain, caches
from tests.support.drawn import examples
from tests.support.refusals import refused
from treeattn.cache.placement import Reach
from treeattn.token_tree import TokenTree


@examples(25)
@given(LAYOUTS, st.integers(1, 8), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_what_was_put_in_comes_out(kind, size, batch, seed):
    """Appended, proposed, committed, taken back, chosen: the shards of a layer together are always the whole
    sequences, whatever is held and wherever it lies."""
    plain = Plain(kind, size, batch, seed)
    actions = [plain.append, plain.append_own, plain.commit, plain.rollback, plain.select]
    for _ in range(10):
        actions[plain.draw.integers(len(actions))]()
        plain.check()


def test_arrays_stay_where_they_are_until_they_must_grow():
    for cache in caches(2, capacity=6, layers=2)[0].layers:
        arrays = cache.k, cache.v, cache.lengths
        for _ in range(6):
            cache.append(ROWS[:, :1], ROWS[:, :1])
        cache.rollback([3])
        cache.append(ROWS, ROWS)
        assert all(a is b for a, b in zip(arrays, (cache.k, cache.v, cache.lengths), strict=True))
        cache.append(ROWS, ROWS)
        assert cache.k is not arrays[0]
        assert cache.lengths is arrays[2]
        assert cache.capacity == 9


def test_layers_find_out_once_what_a_token_means(monkeypatch):
    """The lengths of a step are computed by the first layer that asks."""
    first, *others = caches(3, capacity=9, layers=4)[1].layers
    asked = []
    begin = Reach.__init__
    monkeypatch.setattr(Reach, "__init__", lambda *given: [asked.append(1), begin(*given)][1])
    for count, act in enumerate(
        (
            lambda cache: cache.append(ROWS, ROWS),
            lambda cache: cache.append(ROWS, ROWS, [1]),
            lambda cache: cache.select([0]),
            lambda cache: cache.rollback([1]),
        ),
        1,
    ):
        for cache in (first, *others):
            act(cache)
        assert len(asked) == count


def test_drafts_stand_where_their_depth_says():
    (shard,) = caches(1, batch=2, capacity=10, drafts=4)
    shard.append(*np.zeros((2, 2, 3, HEADS, DIM), np.float32), counts=[3, 1])
    tree = TokenTree.from_parents([[1, 2, 3, 4]] * 2, [[-1, 0, 0, 1]] * 2, [4, 1])
    assert shard.draft_positions(tree).tolist() == [[3, 4, 4, 5], [1, 1, 1, 1]]


ROWS = np.zeros((1, 2, HEADS, DIM), np.float32)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda shard: shard.append(ROWS, ROWS[:, :1]), "they must be the same"),
        (lambda shard: shard.append(ROWS[..., :4], ROWS[..., :4]), "kv_heads, head_dim] = [1, any, 2, 8]"),
        (lambda shard: shard.append(ROWS.astype(int), ROWS), "k is int64, expected float32: k and v"),
        (lambda shard: shard.append(ROWS.tolist(), ROWS), "k is a list: pass an array"),
        (lambda shard: shard.append(ROWS, ROWS, [3]), "1 whole numbers from 0 to 2"),
        (lambda shard: shard.append(ROWS, ROWS, [0.5]), "whole numbers"),
        (lambda shard: [shard.append(ROWS, ROWS) for _ in range(3)], "exceed the capacity of 5, for which"),
        (lambda shard: shard.append(ROWS), "v is missing: this cache has values of its own"),
        (lambda shard: shard.select([1]), "numbers of the 1 sequences, 0 to 0"),
        (lambda shard: shard.select([]), "rows []"),
        (lambda shard: shard.append_own(ROWS, ROWS, [3]), "of the next [3], 3 are this rank's"),
        (lambda shard: shard.append_own(ROWS, ROWS, None), "counts of object: whole numbers"),
        (lambda shard: shard.propose(ROWS, ROWS, TokenTree.chain([[1], [2]])), "2 rows, the cache 1"),
        (lambda shard: shard.propose(ROWS, ROWS, TokenTree.chain([[1]])), "a tree of 1 slots"),
        (lambda shard: shard.propose(ROWS, ROWS, TokenTree.chain([[1, 2]])), "at most drafts=1"),
        (lambda shard: shard.rollback([1]), "from 0 to [0] are there"),
        (lambda shard: shard.rollback([[1], [0, 1]]), "totals: no array of whole numbers"),
        (lambda shard: shard.owners([5]), "room for 5"),
        (lambda shard: shard.owners([-1, 2]), "position -1"),
        (lambda shard: shard.owners([0.5]), "positions of float64: whole numbers"),
    ],
)
def test_what_does_not_fit(call, words):
    (shard,) = caches(1, capacity=5, drafts=1, layout="contiguous")
    with refused(words):
        call(shard)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.slow
def test_tensors_of_torch_are_taken(dtype):
    """Their types are no types of NumPy's; the cache may be planned with them, too."""
    torch = pytest.importorskip("torch")
    (shard,) = caches(1, capacity=5, dtype=getattr(torch, dtype))
    new = torch.arange(32, dtype=getattr(torch, dtype)).reshape(1, 2, HEADS, DIM)
    shard.append(new, new)
    assert shard.k[:, :2].astype(float).tolist() == new.tolist()
    shard.append(new.transpose(1, 3).contiguous().transpose(1, 3), new[:, :, :1].expand(-1, -1, HEADS, -1))
    assert shard.k[:, 2:4].astype(float).tolist() == new.tolist()  # strided: what is copied may lie anyhow
    with refused(f"k is float16, expected {dtype}"):
        shard.append(new.half(), new.half())


def test_a_path_that_is_none():
    """An error changes nothing: the right path can still be kept, and then the drafts are forgotten."""
    (shard,) = caches(1, capacity=4, drafts=3, layout="contiguous")
    shard.append(ROWS[:, [0, 1, 0]], ROWS[:, [0, 1, 0]])
    tree = TokenTree.from_parents([[1, 2, 3]], [[-1, 0, 0]])
    for kept, total in (([[0]], 4), ([[]], 4)):
        shard.propose(ROWS[:, [0, 1, 0]], ROWS[:, [0, 1, 0]], tree)
        for path, words in (
            ([[1]], "is no path of row 0"),
            ([[0, 1, 2]], "is no path of row 0"),
            ([[0, 1]], "exceed the capacity of 4"),
            ([[0, -1, 1]], "and then nothing but -1"),
            ([0], "for each of 1 rows"),
            ([[0.0]], "path of float64: whole numbers"),
            ([[0], [0, 1]], "path: no array of whole numbers"),
        ):
            with refused(words):
                shard.commit(path)
        shard.commit(kept)
        assert (shard.totals.tolist(), shard.lengths.tolist()) == ([total], [total])
        with refused("propose them first"):
            shard.commit(kept)
    shard.propose(ROWS[:, [0, 1, 0]], ROWS[:, [0, 1, 0]], tree)
    shard.rollback()
    with refused("propose them first"):
        shard.commit([[0]])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"capacity": 0}, "capacity must be a positive whole number"),
        ({"capacity": 2.0}, "capacity must be"),
        ({"drafts": -1}, "drafts must be"),
        ({"layout": "sizes=1,1"}, "adds up to 2 tokens"),
        ({"layout": "round"}, "unknown layout"),
        ({"layout": [0, 1, 2, 0]}, "the rank (0 to 1) of each of 4 positions"),
        ({"layout": [0, 1]}, "each of 4 positions"),
        ({"head_dim": 7}, "head_dim 7"),
        ({"layers": 0}, "layers must be"),
        ({"latent": True, "v_dim": 16}, "v_dim 16 of a latent cache"),
        ({"dtype": "float8_e5m2"}, "a cache of float8_e5m2 needs k_scale"),
        ({"dtype": "int8"}, "dtype 'int8'"),
    ],
)
def test_what_cannot_be_planned(options, words):
    with refused(words):
        caches(2, **{"capacity": 4, **options})
