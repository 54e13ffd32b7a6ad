"""Draft tokens as a tree: who follows whom, for a batch of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from treeattn.errors import ArgumentError
from treeattn.token_tree import drawing, grow
from treeattn.token_tree.mask_words import mask_words
from treeattn.token_tree.pack import pack

__all__ = ["TokenTree"]

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, eq=False)
class TokenTree:
    """A tree (or forest) of draft tokens in each row of a batch; parents stand before their children.

    Made by `from_beams`, `from_parents`, `from_paths` or `chain`; `union` and `prune` make others of it. It
    lies in the memory of the host, in arrays that are not to be written.

    tokens: [batch, L] integers. parents: [batch, L], the slot of the token before, -1 for one that follows
    the context. lengths: [batch], the nodes of each row; slots from there on are pads: node 0 again, without
    a parent. origin: [batch, L], where each node's token stood in what the tree was made from (a row of it,
    flattened). unpack_map: the other way, the slot of each token that was given, in the shape it was given
    in; -1 where it was dropped.
    """

    tokens: Array
    parents: Array
    lengths: Array
    origin: Array
    unpack_map: Array

    def __post_init__(self) -> None:
        for name in ("tokens", "parents", "lengths", "origin", "unpack_map"):
            getattr(self, name).flags.writeable = False

    @classmethod
    def from_beams(cls, beams: Any) -> TokenTree:
        """The distinct prefixes of beams [batch, beams, tokens], slots as `pack` gives them.

        Raises `ArgumentError` for what are no beams. Those of CuPy are copied to the host.
        """
        packed = pack(beams.get() if hasattr(beams, "get") else beams)
        before = np.full_like(packed.unpack_map, -1)
        before[..., 1:] = packed.unpack_map[..., :-1]
        parents = np.take_along_axis(before.reshape(len(before), -1), packed.packed_token_indices, 1)
        return cls(
            packed.packed_beam,
            np.where(grow.real(packed.lengths, parents.shape[1]), parents, -1).astype(np.int32),
            packed.lengths,
            packed.packed_token_indices,
            packed.unpack_map,
        )

    @classmethod
    def from_parents(cls, tokens: Any, parents: Any, lengths: Any = None) -> TokenTree:
        """A tree from the parent of each token, both [batch, L], -1 for a token that follows the context.

        Any order will do: nodes whose parents come first keep theirs, the others move behind their parents;
        `origin` says which stands where. lengths: [batch], valid tokens of each row, all unless said; there
        are L slots whatever they are.

        Raises `ArgumentError` for tokens or parents that are no integers, parents that form a cycle or lie
        outside the row.
        """
        return cls(*grow.sorted_by_parents(tokens, parents, lengths))

    @classmethod
    def from_paths(cls, paths: Sequence[Any]) -> TokenTree:
        """A tree from paths of tokens from the first on, of any lengths: for each row a list of paths.

        What paths share at their beginning is one node, in the order in which it is first named, so a list of
        all nodes by their paths, as Medusa's, will do. A list of paths alone is a batch of one row. Raises
        `ArgumentError` for a row without a token.
        """
        return cls(*grow.along_paths(paths))

    @classmethod
    def chain(cls, tokens: Any, lengths: Any = None) -> TokenTree:
        """The tree of one path: each of the tokens [batch, L] follows the one before it."""
        tokens = grow.integers("tokens", tokens)
        parents = np.broadcast_to(np.arange(-1, tokens.shape[-1] - 1), tokens.shape) if tokens.ndim else 0
        return cls.from_parents(tokens, parents, lengths)

    def union(self, *others: TokenTree) -> TokenTree:
        """One tree that holds every path of these trees: prefixes that they share are one node.

        `origin` counts slots of the first tree, then those of the second, and so on; `unpack_map`
        [batch, sum of L] is -1 for pads. Raises `ArgumentError` for another batch.
        """
        return TokenTree(*grow.united([self, *others]))

    def prune(self, scores: Any, budget: int) -> TokenTree:
        """The best `budget` nodes of each row, by scores [batch, L], with all their ancestors.

        A node counts for no more than its ancestors do, so none is kept without them; among equals the first
        slots are kept. With cumulative log-probabilities these are the most probable nodes (EAGLE-2, arXiv
        2406.16858, section 4.2). Raises `ArgumentError` for a budget below 1, scores of another shape or NaN.
        """
        return TokenTree(*grow.pruned(self, scores, budget))

    @property
    def batch(self) -> int:
        """Rows."""
        return len(self.tokens)

    @property
    def nodes(self) -> int:
        """Slots of every row, L, as many as the largest tree needs."""
        return int(self.tokens.shape[1])

    @cached_property
    def real(self) -> Array:
        """Which slots are nodes, not pads, bool [batch, L]."""
        return grow.real(self.lengths, self.nodes)

    @cached_property
    def ancestry(self) -> Array:
        """Each node, its parent and so on to the root, then -1, [batch, L, depth]; a pad has node 0's."""
        slots = np.where(self.real, np.arange(self.nodes), np.where(self.lengths[:, None] > 0, 0, -1))
        path = [slots]
        while (path[-1] >= 0).any():
            above = np.take_along_axis(self.parents, np.maximum(path[-1], 0), 1)
            path.append(np.where(path[-1] >= 0, above, -1))
        return np.stack(path[:-1] or path, axis=2)

    @cached_property
    def depths(self) -> Array:
        """[batch, L] int64, from 0; a node's position is that of the token after the context plus this."""
        return np.asarray(np.maximum((self.ancestry >= 0).sum(2) - 1, 0))

    @cached_property
    def mask(self) -> Array:
        """Bool [batch, query, key]; a node sees its ancestors and itself, a pad what node 0 sees."""
        seen = np.zeros((self.batch, self.nodes, self.nodes + 1), bool)  # the last for -1
        rows, queries = np.ogrid[: self.batch, : self.nodes]
        seen[rows[..., None], queries[..., None], self.ancestry] = True
        return np.ascontiguousarray(seen[..., :-1])

    def mask_words(self, words: int | None = None) -> Array:
        """The mask in bits: see `treeattn.token_tree.mask_words`."""
        packed: Array = mask_words(self.mask, words)
        return packed

    def children(self, row: int, slot: int = -1) -> Array:
        """The slots that follow a slot of a row; -1: those that follow the context."""
        return np.flatnonzero((self.parents[row] == slot) & self.real[row])

    def path(self, row: int, slot: int) -> Array:
        """The slots from the root to this one."""
        above = self.ancestry[row, slot]
        return np.asarray(above[above >= 0][::-1])

    @cached_property
    def leaf_paths(self) -> Array:
        """The slots from the root to each leaf, then -1, [batch, leaves, depth]; by the leaves' slots."""
        inner = np.zeros(self.tokens.shape, bool)
        rows, slots = np.nonzero(self.parents >= 0)
        inner[rows, self.parents[rows, slots]] = True
        leaves = [np.flatnonzero(row) for row in self.real & ~inner]
        paths = np.full((self.batch, max(map(len, leaves)), self.ancestry.shape[2]), -1)
        for row, found in enumerate(leaves):
            for index, leaf in enumerate(found):
                path = self.path(row, int(leaf))
                paths[row, index, : len(path)] = path
        return paths

    def check_path(self, row: int, path: Any) -> Array:
        """A path as int64. Raises `ArgumentError` unless it goes down from a root of the row, or is empty."""
        path = np.asarray(path if len(path) else np.empty(0, np.int64))
        if path.ndim != 1 or path.dtype.kind not in "iu":
            raise ArgumentError(f"a path is a list of slots, not {path.dtype} {list(path.shape)}")
        inside = bool(((path >= 0) & (path < self.lengths[row])).all())
        if not inside or self.parents[row, path].tolist() != [-1, *path[:-1].tolist()][: len(path)]:
            raise ArgumentError(
                f"{path.tolist()} is no path of row {row}: it begins with a slot that follows the context, "
                "and each slot follows the one before"
            )
        return np.asarray(path, np.int64)

    def text(self, row: int = 0, label: Callable[[int], str] = str) -> str:
        """A drawing of a row: see `treeattn.token_tree.drawing.text`."""
        return drawing.text(self, row, label)

    def svg(self, row: int = 0, label: Callable[[int], str] = str) -> str:
        """A drawing of a row: see `treeattn.token_tree.drawing.svg`."""
        return drawing.svg(self, row, label)

    @cached_property
    def digest(self) -> str:
        """Equal for equal trees, which is what ranks compare."""
        found = hashlib.sha256(repr((self.tokens.shape, self.lengths.tolist())).encode())
        found.update(self.tokens.astype(np.int64).tobytes() + self.parents.tobytes())
        return found.hexdigest()

    def __repr__(self) -> str:
        return f"TokenTree({self.batch} rows of {self.lengths.tolist()} nodes)"
