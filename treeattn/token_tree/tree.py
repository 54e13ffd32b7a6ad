"""Draft tokens as a tree, for a batch of them: parents, paths, the mask, and how trees are made."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from treeattn.errors import ArgumentError
from treeattn.token_tree.pack import pack

Integers = NDArray[np.integer[Any]]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class TokenTree:
    """A tree (or forest) of draft tokens in each row of a batch; parents come before their children.

    Made by `from_beams`, `from_parents`, `from_paths` or `chain`. It lies in the
    memory of the host, in arrays that are not to be written.

    tokens: [batch, L] integers. parents: [batch, L] int32, the slot of the token before, -1 for one that
    follows the context. lengths: [batch], the nodes of each row; slots from there on are pads: node 0 again,
    without a parent. unpack_map: the slot of each token that was given, in the shape it was given in; -1
    where it is in no node.

    >>> tree = treeattn.token_tree.TokenTree.from_paths([[7, 1, 2], [7, 3]])
    >>> tree.tokens.tolist(), tree.parents.tolist(), tree.depths.tolist()
    ([[7, 1, 2, 3]], [[-1, 0, 1, 0]], [[0, 1, 2, 1]])
    """

    tokens: Integers
    parents: Integers
    lengths: Integers
    unpack_map: Integers

    def __post_init__(self) -> None:
        for name in ("tokens", "parents", "lengths", "unpack_map"):
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
            unpack_map=packed.unpack_map,
        )

    @classmethod
    def from_parents(
        cls, tokens: ArrayLike, parents: ArrayLike, lengths: ArrayLike | None = None
    ) -> TokenTree:
        """A tree from the parent of each token, both [batch, L]: an earlier token, or -1 for one that follows
        the context. lengths: [batch], valid tokens of each row, all unless given; there are L slots whatever
        they are.

        Raises `ArgumentError` for tokens or parents that are no integers, and a parent that does not come
        before its child.
        """
        words, above = integers("tokens", tokens), integers("parents", parents)
        if words.ndim != 2 or words.shape != above.shape or 0 in words.shape:
            raise ArgumentError(
                f"tokens {list(words.shape)} and parents {list(above.shape)}: both are [batch, nodes]"
            )
        counts = _checked_lengths(lengths, *words.shape)
        real = _valid(counts, words.shape[1])
        above, slots = np.where(real, above.astype(np.int64), -1), np.arange(words.shape[1])
        for row, node in np.argwhere((above < -1) | (above >= slots)).tolist():
            raise ArgumentError(
                f"row {row}: node {node} has parent {above[row, node]}: it is an earlier node of the row, or "
                "-1 for what follows the context"
            )
        return cls(
            tokens=np.where(real, words, words[:, :1]),
            parents=above.astype(np.int32),
            lengths=counts,
            unpack_map=np.where(real, slots, -1),
        )

    @classmethod
    def from_paths(cls, paths: Sequence[Any]) -> TokenTree:
        """A tree from paths of tokens from the first on, of any lengths: for each row a list of paths.

        What paths share at their beginning is one node, in the order in which it is first named, so a list of
        all nodes by their paths, as Medusa's, will do. A list of paths alone is a batch of one row. Raises
        `ArgumentError` for a row without a token.
        """
        rows = _batch_of_paths(paths)
        longest = max(len(path) for row in rows for path in row)
        unpack_map = np.full((len(rows), max(map(len, rows)), longest), -1)
        prefixes: list[dict[tuple[int, int], int]] = [{} for _ in rows]  # slots by (parent, token)
        for row, (slots, given) in enumerate(zip(prefixes, rows, strict=True)):
            for index, path in enumerate(given):
                here = -1
                for depth, token in enumerate(path):
                    here = slots.setdefault((here, int(token)), len(slots))
                    unpack_map[row, index, depth] = here
        lengths = np.array(list(map(len, prefixes)))
        shape = len(rows), int(lengths.max())
        tokens, parents = np.zeros(shape, np.int64), np.full(shape, -1, np.int32)
        for row, slots in enumerate(prefixes):
            parents[row, : len(slots)], tokens[row, : len(slots)] = np.transpose(list(slots))
            tokens[row, len(slots) :] = tokens[row, 0]
        return cls(tokens, parents, lengths, unpack_map)

    @classmethod
    def chain(cls, tokens: ArrayLike, lengths: ArrayLike | None = None) -> TokenTree:
        """The tree of one path: each of the tokens [batch, L] follows the one before it."""
        words = integers("tokens", tokens)
        parents = np.broadcast_to(np.arange(-1, words.shape[-1] - 1), words.shape) if words.ndim else 0
        return cls.from_parents(words, parents, lengths)

    @property
    def batch(self) -> int:
        """How many rows the batch has."""
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

    @cached_property
    def digest(self) -> str:
        """SHA-256 by which ranks compare trees: equal for equal ones."""
        found = hashlib.sha256(repr((self.tokens.shape, self.lengths.tolist())).encode())
        found.update(self.tokens.astype(np.int64).tobytes() + self.parents.tobytes())
        return found.hexdigest()

    def __repr__(self) -> str:
        return f"TokenTree({self.batch} rows of {self.lengths.tolist()} nodes)"


def _valid(lengths: Integers, nodes: int) -> Mask:
    """[batch, nodes] bool: which slots are no pads."""
    return np.asarray(np.arange(nodes) < lengths[:, None])


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
        for token in (token for path in given for token in path):
            whole = isinstance(token, int | np.integer) and not isinstance(token, bool)
            if not (whole and -(2**63) <= token < 2**63):
                raise ArgumentError(f"row {row}: {token!r:.40} is no token id, an integer of 64 bits")
    if not deep:
        raise ArgumentError("no paths: give a list of them for each row of the batch")
    return deep


def integers(name: str, given: ArrayLike, shape: tuple[int, ...] | None = None) -> Integers:
    """An array of integers, of this shape if one is given. Raises `ArgumentError`."""
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
    return counts.astype(np.int64)  # of its own: nobody may write it
