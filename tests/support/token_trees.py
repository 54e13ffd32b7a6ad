"""Verification cases, drawn from a seed, and the oracle: each node over all that it sees, in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from treeattn import reference
from treeattn.shards import parse_layout
from treeattn.token_tree import TokenTree

DTYPES = ("float64", "float32", "float16")


@dataclass
class Case:
    """The whole of a problem: arrays [batch, ..], the context with all its tokens, and who owns which."""

    tree: TokenTree
    q: Any
    k: Any
    v: Any
    draft_k: Any
    draft_v: Any
    lengths: Any
    owners: Any

    @staticmethod
    def draw(
        seed: int, size: int, dtypes: tuple[str, ...] = DTYPES, dims: tuple[int, ...] = (8, 16, 24)
    ) -> Case:
        """One of many, for `size` ranks."""
        draw = np.random.default_rng(seed)
        batch, beams, columns = (int(draw.integers(1, n)) for n in (4, 6, 5))
        tree = TokenTree.from_beams(draw.integers(0, 2, (batch, beams, columns)))
        kv_heads, group, head_dim = (int(draw.choice(n)) for n in ((1, 2, 3), (1, 2, 4), dims))
        tokens, dtype = int(draw.integers(0, 40)), dtypes[seed % len(dtypes)]

        def rows(count: int, heads: int) -> Any:
            return draw.standard_normal((batch, count, heads, head_dim)).astype(dtype)

        q, k, v = rows(tree.nodes, kv_heads * group), rows(tokens, kv_heads), rows(tokens, kv_heads)
        draft_k, draft_v = rows(tree.nodes, kv_heads), rows(tree.nodes, kv_heads)
        lengths = draw.integers(0, tokens + 1, batch)
        return Case(tree, q, k, v, draft_k, draft_v, lengths, Case._owners(draw, tokens, size))

    @staticmethod
    def _owners(draw: np.random.Generator, tokens: int, size: int) -> Any:
        """The rank of each token of the context: every layout, and shards that are empty."""
        name = draw.choice(["contiguous", "interleaved", "zigzag", "sizes", "one"])
        if name == "one":
            return np.full(tokens, draw.integers(size))
        if name == "sizes":
            return np.sort(draw.integers(0, size, tokens))
        owners = np.zeros(tokens, np.int64)
        for rank in range(size):
            for run in parse_layout(str(name)).runs(tokens, rank, size):
                owners[run] = rank
        return owners

    @property
    def scale(self) -> float:
        return float(self.q.shape[-1] ** -0.5)

    def shard(self, rank: int, hidden: float = np.nan) -> tuple[Any, Any, Any]:
        """(k, v, lengths) of a rank. What lies beyond the lengths is `hidden`."""
        own = np.flatnonzero(self.owners == rank)
        k, v = self.k[:, own], self.v[:, own]
        lengths = np.array([(own < length).sum() for length in self.lengths])
        for row, length in enumerate(lengths):
            k[row, length:], v[row, length:] = hidden, hidden
        return k, v, lengths

    def check(self, out: Any, lse: Any) -> None:
        """Hold results to the oracle's; pads have none."""
        wanted, wanted_lse, bound, lse_bound = self.dense()
        assert out.dtype == lse.dtype == (np.float64 if self.q.dtype == np.float64 else np.float32)
        assert np.abs(out - wanted).max() <= bound
        real = np.broadcast_to(self.tree.real[:, None], lse.shape)
        assert np.abs(lse[real] - wanted_lse[real]).max() <= lse_bound
        assert (lse[~real] == -np.inf).all()
        assert not out[~self.tree.real].any()

    def dense(self) -> tuple[Any, Any, float, float]:
        """(out, lse) of every node and how far they may be off: each over its context and its ancestors."""
        tree = self.tree
        context = np.arange(self.k.shape[1]) < self.lengths[:, None, None]
        context = np.broadcast_to(context, (*self.q.shape[:2], self.k.shape[1]))
        seen = np.concatenate([context, tree.mask], 2) & tree.real[:, :, None]
        k, v = (np.concatenate(pair, 1) for pair in ((self.k, self.draft_k), (self.v, self.draft_v)))
        part = reference.partial(self.q, k, v, scale=self.scale, seen=seen)
        bounds = (1e-12, 1e-12) if self.q.dtype == np.float64 else reference.error_bounds([part])
        return *reference.combine([part]), *bounds
