"""Draft tokens as a tree, for a batch of them: parents, paths, the mask, and how trees are made."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from treeattn.errors import ArgumentError
from treeattn.token_tree import drawing
from treeattn.token_tree.pack import mask_words, pack

Integers = NDArray[np.integer[Any]]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class TokenTree:
    """A tree (or forest) of draft tokens in each row of a batch; parents stand before their children.

    Made by `from_beams`, `from_parents`, `from_paths` or `chain`; `union` and `prune` make others of it. It
    lies in the memory of the host, in arrays that are not to be written.

    tokens: [batch, L] integers. parents: [batch, L] int32, the slot of the token before, -1 for one that
    follows the context. lengths: [batch], the nodes of each row; slots from there on are pads: node 0 again,
    without a parent. origin: [batch, L], where each node's token stood in what the tree was made from (a row
    of it, flattened). unpack_map: the other way, the slot of each token that was given, in the shape it was
    given in; -1 where it was dropped.
    """

    tokens: Integers
    parents: Integers
    lengths: Integers
    origin: Integers
    unpack_map: Integers

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
            tokens=packed.packed_beam,
            parents=np.where(_valid(packed.lengths, parents.shape[1]), parents, -1).astype(np.int32),
            lengths=packed.lengths,
            origin=packed.packed_token_indices,
            unpack_map=packed.unpack_map,
        )

    @classmethod
    def from_parents(
        cls, tokens: ArrayLike, parents: ArrayLike, lengths: ArrayLike | None = None
    ) -> TokenTree:
        """A tree from the parent of each token, both [batch, L], -1 for a token that follows the context.

        Any order will do: nodes whose parents come first keep theirs, the others move behind their parents;
        `origin` says which stands where. lengths: [batch], valid tokens of each row, all unless given; there
        are L slots whatever they are.

        Raises `ArgumentError` for tokens or parents that are no integers, parents that form a cycle or lie
        outside the row.
        """
        words, above = integers("tokens", tokens), integers("parents", parents)
        if words.ndim != 2 or words.shape != above.shape or 0 in words.shape:
            raise ArgumentError(
                f"tokens {list(words.shape)} and parents {list(above.shape)}: both are [batch, nodes]"
            )
        counts = _checked_lengths(lengths, *words.shape)
        orders = [_parents_first(row, above[row, :count].tolist()) for row, count in enumerate(counts)]
        return cls._keep(words, above, orders, words.shape[1])

    @classmethod
    def from_paths(cls, paths: Sequence[Any]) -> TokenTree:
        """A tree from paths of tokens from the first on, of any lengths: for each row a list of paths.

        What paths share at their beginning is one node, in the order in which it is first named, so a list of
        all nodes by their paths, as Medusa's, will do. A list of paths alone is a batch of one row. Raises
        `ArgumentError` for a row without a token.
        """
        rows = _batch_of_paths(paths)
        prefixes = [_Prefixes(row) for row in rows]
        longest = max(len(path) for row in rows for path in row)
        unpack_map = np.full((len(rows), max(map(len, rows)), longest), -1)
        for row, found in enumerate(prefixes):
            for index, slots in enumerate(found.paths):
                unpack_map[row, index, : len(slots)] = slots
        return cls._of_prefixes(prefixes, unpack_map, np.dtype(np.int64))

    @classmethod
    def chain(cls, tokens: ArrayLike, lengths: ArrayLike | None = None) -> TokenTree:
        """The tree of one path: each of the tokens [batch, L] follows the one before it."""
        words = integers("tokens", tokens)
        parents = np.broadcast_to(np.arange(-1, words.shape[-1] - 1), words.shape) if words.ndim else 0
        return cls.from_parents(words, parents, lengths)

    def union(self, *others: TokenTree) -> TokenTree:
        """One tree that holds every path of these trees: prefixes that they share are one node.

        `origin` counts slots of the first tree, then those of the second, and so on; `unpack_map`
        [batch, sum of L] is -1 for pads. Raises `ArgumentError` for another batch.
        """
        trees = self, *others
        if len(batches := {tree.batch for tree in trees}) > 1:
            raise ArgumentError(f"trees of {sorted(batches)} rows: only those of one batch have a union")
        dtype = _common_integers([tree.tokens for tree in trees])
        prefixes = [
            _Prefixes(tree._words(row, slot) for tree in trees for slot in range(tree.nodes))
            for row in range(self.batch)
        ]
        unpack_map = np.array([[path[-1] if path else -1 for path in found.paths] for found in prefixes])
        return self._of_prefixes(prefixes, unpack_map, dtype)

    def prune(self, scores: ArrayLike, budget: int) -> TokenTree:
        """The best `budget` nodes of each row, by scores [batch, L], with all their ancestors.

        A node counts for no more than its ancestors do, so none is kept without them; among equals the first
        slots are kept. With cumulative log-probabilities these are the most probable nodes (EAGLE-2, arXiv
        2406.16858, section 4.2). Raises `ArgumentError` for a budget below 1, scores of another shape or NaN.
        """
        try:
            worth = np.asarray(scores, np.float64)
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"scores are no numbers ({error})") from None
        if worth.shape != self.tokens.shape or np.isnan(worth[self.real]).any():
            raise ArgumentError(
                f"scores {list(worth.shape)}: numbers {list(self.tokens.shape)} are needed, and no NaN"
            )
        if isinstance(budget, bool) or not isinstance(budget, int | np.integer) or budget < 1:
            raise ArgumentError(f"budget {budget!r}: a number of nodes, at least 1")
        along = worth[np.arange(self.batch)[:, None, None], self.ancestry]
        worst = np.where(self.ancestry >= 0, along, np.inf).min(2)
        orders = [  # among equals the ancestor is the first
            sorted(np.argsort(-worst[row, :length], kind="stable")[:budget].tolist())
            for row, length in enumerate(self.lengths)
        ]
        return self._keep(self.tokens, self.parents, orders)

    @property
    def batch(self) -> int:
        """Rows of the batch."""
        return len(self.tokens)

    @property
    def nodes(self) -> int:
        """Slots of every row, L, as many as the largest tree needs."""
        return int(self.tokens.shape[1])

    @cached_property
    def real(self) -> Mask:
        """Which slots are nodes, not pads, bool [batch, L]."""
        return _valid(self.lengths, self.nodes)

    @cached_property
    def ancestry(self) -> Integers:
        """Each node, its parent and so on to the root, then -1, [batch, L, depth]; a pad has node 0's."""
        slots = np.where(self.real, np.arange(self.nodes), np.where(self.lengths[:, None] > 0, 0, -1))
        path = [slots]
        while (path[-1] >= 0).any():
            above = np.take_along_axis(self.parents, np.maximum(path[-1], 0), 1)
            path.append(np.where(path[-1] >= 0, above, -1))
        return np.stack(path[:-1] or path, axis=2)

    @cached_property
    def depths(self) -> Integers:
        """[batch, L] int64, from 0; a node's position is that of the token after the context plus this."""
        return np.asarray(np.maximum((self.ancestry >= 0).sum(2) - 1, 0))

    @cached_property
    def mask(self) -> Mask:
        """Bool [batch, query, key]; a node sees its ancestors and itself, a pad what node 0 sees."""
        seen = np.zeros((self.batch, self.nodes, self.nodes + 1), bool)  # the last for -1
        rows, queries = np.ogrid[: self.batch, : self.nodes]
        seen[rows[..., None], queries[..., None], self.ancestry] = True
        return np.ascontiguousarray(seen[..., :-1])

    def mask_words(self, words: int | None = None) -> NDArray[np.uint32]:
        """The mask in bits: see `treeattn.token_tree.mask_words`."""
        packed: NDArray[np.uint32] = mask_words(self.mask, words)
        return packed

    def children(self, row: int, slot: int = -1) -> Integers:
        """The slots that follow a slot of a row; -1: those that follow the context."""
        return np.flatnonzero((self.parents[row] == slot) & self.real[row])

    def path(self, row: int, slot: int) -> Integers:
        """The slots from the root to this one."""
        above = self.ancestry[row, slot]
        return np.asarray(above[above >= 0][::-1])

    @cached_property
    def inner(self) -> Mask:
        """Which slots are nodes that others follow, bool [batch, L]."""
        inner = np.zeros(self.tokens.shape, bool)
        rows, slots = np.nonzero(self.parents >= 0)
        inner[rows, self.parents[rows, slots]] = True
        return inner

    @cached_property
    def leaf_paths(self) -> Integers:
        """The slots from the root to each leaf, then -1, [batch, leaves, depth]; by the leaves' slots."""
        leaves = [np.flatnonzero(row) for row in self.real & ~self.inner]
        paths = np.full((self.batch, max(map(len, leaves)), self.ancestry.shape[2]), -1)
        for row, found in enumerate(leaves):
            for index, leaf in enumerate(found):
                path = self.path(row, int(leaf))
                paths[row, index, : len(path)] = path
        return paths

    def check_path(self, row: int, path: ArrayLike) -> NDArray[np.int64]:
        """A path as int64. Raises `ArgumentError` unless it goes down from a root of the row, or is empty."""
        slots = np.asarray(path)
        slots = slots if slots.size else np.empty(0, np.int64)
        if slots.ndim != 1 or slots.dtype.kind not in "iu":
            raise ArgumentError(f"a path is a list of slots, not {slots.dtype} {list(slots.shape)}")
        inside = bool(((slots >= 0) & (slots < self.lengths[row])).all())
        if not inside or self.parents[row, slots].tolist() != [-1, *slots[:-1].tolist()][: len(slots)]:
            raise ArgumentError(
                f"{slots.tolist()} is no path of row {row}: it begins with a slot that follows the context, "
                "and each slot follows the one before"
            )
        return np.asarray(slots, np.int64)

    def text(self, row: int = 0, label: Callable[[int], str] = str) -> str:
        """A drawing of a row: see `treeattn.token_tree.drawing.text`."""
        return drawing.text(self, row, label)

    def svg(self, row: int = 0, label: Callable[[int], str] = str) -> str:
        """A drawing of a row: see `treeattn.token_tree.drawing.svg`."""
        return drawing.svg(self, row, label)

    @cached_property
    def digest(self) -> str:
        """SHA-256 by which ranks compare trees: equal for equal ones."""
        found = hashlib.sha256(repr((self.tokens.shape, self.lengths.tolist())).encode())
        found.update(self.tokens.astype(np.int64).tobytes() + self.parents.tobytes())
        return found.hexdigest()

    def __repr__(self) -> str:
        return f"TokenTree({self.batch} rows of {self.lengths.tolist()} nodes)"

    def _words(self, row: int, slot: int) -> list[int]:
        """The tokens from the root to a slot; none for a pad."""
        return self.tokens[row, self.path(row, slot)].tolist() if self.real[row, slot] else []

    @classmethod
    def _keep(
        cls, tokens: Integers, parents: Integers, orders: Sequence[Sequence[int]], nodes: int = 1
    ) -> TokenTree:
        """The nodes of `orders`, for each row the slots that stay in their new order, ancestors among them.
        nodes: slots that there are at least."""
        batch, nodes = len(orders), max(nodes, *map(len, orders))
        origin, lengths = np.zeros((batch, nodes), np.int64), np.array(list(map(len, orders)), np.int64)
        slots = np.full((batch, parents.shape[1] + 1), -1)  # the last is the slot of -1
        for row, order in enumerate(orders):
            origin[row, : len(order)] = order
            origin[row, len(order) :] = order[0] if order else 0
            slots[row, list(order)] = np.arange(len(order))
        before = np.where(_valid(lengths, nodes), np.take_along_axis(parents, origin, 1), -1)
        return cls(
            tokens=np.take_along_axis(tokens, origin, 1),
            parents=np.take_along_axis(slots, before, 1).astype(np.int32),
            lengths=lengths,
            origin=origin,
            unpack_map=slots[:, :-1].copy(),
        )

    @classmethod
    def _of_prefixes(
        cls, prefixes: Sequence[_Prefixes], unpack_map: Integers, dtype: np.dtype[Any]
    ) -> TokenTree:
        lengths = np.array([len(found.slots) for found in prefixes])
        shape = len(prefixes), max(1, int(lengths.max()))
        tokens, parents = np.zeros(shape, dtype), np.full(shape, -1, np.int32)
        origin = np.zeros(shape, np.int64)
        for row, found in enumerate(prefixes):
            for slot, (parent, token) in enumerate(found.slots):
                tokens[row, slot], parents[row, slot] = token, parent
            slots, first = np.unique(unpack_map[row], return_index=True)
            origin[row, slots[slots >= 0]] = first[slots >= 0]
            for array in (tokens, origin):  # pads are node 0
                array[row, lengths[row] :] = array[row, 0]
        return cls(tokens, parents, lengths, origin, unpack_map)


class _Prefixes:
    """The distinct prefixes of a row's paths in the order they appear: their slots by (parent, token), and
    the slots of each path."""

    def __init__(self, paths: Iterable[Sequence[int]]) -> None:
        self.slots: dict[tuple[int, int], int] = {}
        self.paths: list[list[int]] = []
        for path in paths:
            here, walked = -1, []
            for token in path:
                here = self.slots.setdefault((here, int(token)), len(self.slots))
                walked.append(here)
            self.paths.append(walked)


def _valid(lengths: Integers, nodes: int) -> Mask:
    """[batch, nodes] bool: which slots are no pads."""
    return np.asarray(np.arange(nodes) < lengths[:, None])


def _parents_first(row: int, parents: list[int]) -> list[int]:
    """A topological order: of the nodes that may come next, the lowest, so that nodes before which all their
    ancestors stand keep their order. Raises `ArgumentError`."""
    children: list[list[int]] = [[] for _ in range(len(parents) + 1)]  # the last: of -1
    for node, parent in enumerate(parents):
        if not -1 <= parent < len(parents):
            raise ArgumentError(
                f"row {row}: node {node} has parent {parent}, a row of {len(parents)} nodes has 0 to "
                f"{len(parents) - 1}, and -1 for what follows the context"
            )
        children[parent].append(node)
    ready, order = list(children[-1]), []
    while ready:
        order.append(heapq.heappop(ready))
        for child in children[order[-1]]:
            heapq.heappush(ready, child)
    if len(order) < len(parents):
        stuck = sorted(set(range(len(parents))) - set(order))
        raise ArgumentError(f"row {row}: the parents of nodes {stuck} form a cycle: each must lead to a -1")
    return order


def _batch_of_paths(paths: Sequence[Any]) -> list[list[list[int]]]:
    """One list of paths for each row. Raises `ArgumentError`."""
    try:
        first = next((token for path in paths for token in path), None)
        rows = [paths] if isinstance(first, int | float | np.generic) else paths
        deep = [list(map(list, row)) for row in rows]
    except TypeError:
        raise ArgumentError("paths are lists of token ids, in a list for each row of the batch") from None
    for row, given in enumerate(deep):
        if not any(given):
            raise ArgumentError(f"row {row} has no path with a token in it")
        if not all(isinstance(t, int | np.integer) and not isinstance(t, bool) for p in given for t in p):
            raise ArgumentError(f"row {row}: a path holds token ids, which are integers")
        if not all(-(2**63) <= t < 2**63 for p in given for t in p):
            raise ArgumentError(f"row {row}: a token id lies beyond int64")
    if not deep:
        raise ArgumentError("no paths: give a list of them for each row of the batch")
    return deep


def _common_integers(arrays: Sequence[Integers]) -> np.dtype[Any]:
    """A type that holds the tokens of all; NumPy makes floats of uint64 beside int64. Raises `ArgumentError`
    where there is none."""
    found = np.result_type(*(array.dtype for array in arrays))
    if found.kind in "iu":
        return found
    least, most = min(int(array.min()) for array in arrays), max(int(array.max()) for array in arrays)
    if least < 0 and most >= 2**63:
        raise ArgumentError(f"no type of integers holds both token {least} and token {most}")
    return np.dtype(np.int64 if most < 2**63 else np.uint64)


def integers(name: str, given: ArrayLike, shape: tuple[int, ...] | None = None) -> Integers:
    """Of this shape, if one is asked for. Raises `ArgumentError`."""
    try:
        array = np.asarray(given)
    except ValueError as error:
        raise ArgumentError(f"{name} are no array ({error}): give rows of equal length") from None
    if array.dtype.kind not in "iu":
        raise ArgumentError(f"{name} are {array.dtype}: integers are needed")
    if shape not in (None, array.shape):
        raise ArgumentError(
            f"{name} are {array.dtype} {list(array.shape)}: integers {list(shape or ())} are needed"
        )
    return array


def _checked_lengths(lengths: ArrayLike | None, batch: int, nodes: int) -> Integers:
    if lengths is None:
        return np.full(batch, nodes)
    counts = integers("lengths", lengths)
    if counts.shape != (batch,) or (counts < 0).any() or (counts > nodes).any():
        raise ArgumentError(
            f"lengths {counts.tolist()}: one for each of {batch} rows, from 0 to {nodes} nodes"
        )
    return np.asarray(counts, np.int64)
