"""Sharded caches of all ranks in one process, and what they should hold together."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import strategies as st

from treeattn.attention.shape import CACHE_DTYPES
from treeattn.cache import ShardedCache, sharded
from treeattn.token_tree import TokenTree

HEADS, DIM = 2, 8


def caches(size, **options):
    """Of ranks whose communicators are enough for planning: everyone passes the same."""
    everyone = {"size": size, "allgather": lambda mine: [mine] * size}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded.communicators, "intracomm", lambda comm: comm)
        plan = {"kv_heads": HEADS, "head_dim": DIM, "dtype": "float32", **options}
        return [ShardedCache(SimpleNamespace(rank=rank, **everyone), **plan) for rank in range(size)]


LAYOUTS = st.sampled_from(["contiguous", "interleaved", "zigzag", "sizes", "owners"])


def layout_of(kind, size, capacity, draw):
    if kind == "owners":
        return draw.integers(0, size, capacity)
    if kind == "sizes":
        cuts = np.sort(draw.integers(0, capacity + 1, size - 1))
        return "sizes=" + ",".join(map(str, np.diff([0, *cuts, capacity])))
    return kind


class Plain:
    """What the caches of all ranks should hold together, for each layer and sequence a list of tokens; each a
    key and a value, or a key alone."""

    def __init__(self, kind, size, batch, seed):
        self.draw = draw = np.random.default_rng(seed)
        self.capacity, self.grows = int(draw.integers(1, 40)), kind == "interleaved"
        self.latent, layers = bool(draw.integers(2)), int(draw.integers(1, 4))
        dtype = str(draw.choice(["float32", "bfloat16", "float8_e4m3fn"]))
        v_dim = None if not draw.integers(3) else 8 if self.latent else int(draw.choice([8, 16]))
        self.widths = (16,) if self.latent else (16, v_dim or 16)
        self.elements = CACHE_DTYPES[dtype]
        scales = {"k_scale": 2.0, "v_scale": [0.5, 1]} if dtype.startswith("float8") else {}
        options = {"head_dim": 16, "v_dim": v_dim, "latent": self.latent, "dtype": dtype, **scales}
        options |= {"batch": batch, "capacity": self.capacity, "layers": layers, "drafts": 9}
        self.ranks = caches(size, layout=layout_of(kind, size, self.capacity, draw), **options)
        self.whole = [[self.tokens(1, 0, row=0) for _ in range(batch)] for _ in range(layers)]

    @property
    def totals(self):
        return np.array([len(sequence[0]) for sequence in self.whole[0]])

    @property
    def room(self):
        return 99 if self.grows else self.capacity - self.totals

    def tokens(self, batch, count, row=None):
        """[array [batch, count, heads, width] for k and perhaps v], or of one row."""
        shapes = [(batch, count, HEADS, width) for width in self.widths]
        arrays = [self.draw.standard_normal(shape).astype(self.elements) for shape in shapes]
        return arrays if row is None else [array[row] for array in arrays]

    def both(self, arrays):
        return (*arrays, None) if self.latent else arrays

    def extend(self, layer, row, arrays):
        self.whole[layer][row] = [
            np.concatenate(pair) for pair in zip(self.whole[layer][row], arrays, strict=True)
        ]

    def each_layer(self):
        for layer in range(len(self.whole)):
            yield layer, [cache.layers[layer] for cache in self.ranks]

    def append(self):
        counts = self.draw.integers(0, np.minimum(self.room, 7) + 1, len(self.totals))
        if self.draw.integers(2):
            counts[:] = counts.min()
        given = None if self.draw.integers(2) and (counts == counts[0]).all() else counts
        for layer, caches in self.each_layer():
            new = self.tokens(len(counts), int(counts.max()))
            for cache in caches:
                cache.append(*self.both(new), given)
            for row, count in enumerate(counts):
                self.extend(layer, row, [array[row, :count] for array in new])

    def append_own(self):
        counts = self.draw.integers(0, np.minimum(self.room, 7) + 1, len(self.totals))
        for layer, caches in self.each_layer():
            new = self.tokens(len(counts), int(counts.max()))
            for cache in caches:
                mine = [
                    np.flatnonzero(cache.owners(cache.totals[row] + np.arange(count)) == cache.rank)
                    for row, count in enumerate(counts)
                ]
                own = self.tokens(len(counts), max(map(len, mine)))
                for row, chosen in enumerate(mine):
                    for array, whole in zip(own, new, strict=True):
                        array[row, : len(chosen)] = whole[row, chosen]
                cache.append_own(*self.both(own), counts)
            for row, count in enumerate(counts):
                self.extend(layer, row, [array[row, :count] for array in new])

    def commit(self):
        batch = len(self.totals)
        tree = TokenTree.from_beams(self.draw.integers(0, 2, (batch, 3, 3)))
        path = np.full((batch, 4), -1)
        for row, room in enumerate(np.broadcast_to(self.room, batch)):
            slots = tree.path(row, int(self.draw.integers(tree.lengths[row])))[:room]
            path[row, : len(slots)] = slots
        for layer, caches in self.each_layer():
            new = self.tokens(batch, tree.nodes)
            for cache in caches:
                before, lengths = cache.k.copy(), cache.lengths.copy()
                cache.propose(*self.both(new), tree)
                cache.commit(path)
                for row, length in enumerate(lengths):  # nothing of the context moved
                    np.testing.assert_array_equal(cache.k[row, :length], before[row, :length])
            for row in range(batch):
                self.extend(layer, row, [array[row, path[row][path[row] >= 0]] for array in new])

    def rollback(self):
        back = self.draw.integers(0, self.totals + 1)
        for layer, caches in self.each_layer():
            for cache in caches:
                cache.rollback(back)
            self.whole[layer] = [
                [array[:total] for array in sequence]
                for sequence, total in zip(self.whole[layer], back, strict=True)
            ]

    def select(self):
        batch = len(self.totals)
        rows = self.draw.integers(0, batch, batch if self.draw.integers(3) else self.draw.integers(1, 5))
        for layer, caches in self.each_layer():
            for cache in caches:
                kept = [cache.k, cache.v, cache.lengths]
                cache.select(rows)
                if len(rows) == batch:
                    assert all(a is b for a, b in zip(kept, [cache.k, cache.v, cache.lengths], strict=True))
            self.whole[layer] = [list(self.whole[layer][row]) for row in rows]

    def check(self):
        for layer, caches in self.each_layer():
            for row, wanted in enumerate(self.whole[layer]):
                for axis, whole in enumerate(wanted):
                    found = np.zeros(len(whole), int)
                    for cache in caches:
                        there = cache.positions.positions(0, int(cache.lengths[row]))
                        array = (cache.k, cache.v)[axis]
                        assert array.dtype == self.elements
                        np.testing.assert_array_equal(array[row, : len(there)], whole[there])
                        np.add.at(found, there, 1)
                    assert (found == 1).all()  # each on one rank
            everyone = np.array([cache.lengths for cache in caches])
            for cache in caches:
                np.testing.assert_array_equal(cache.totals, self.totals)
                np.testing.assert_array_equal(cache.shard_lengths, everyone)
                assert cache.capacity >= max(self.totals.max(), self.capacity)
