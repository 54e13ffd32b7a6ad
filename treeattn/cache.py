"""A KV cache that is sharded over ranks and grows: every token on the one rank that an owner map says.

The map is fixed over the capacity, so where a token lies follows from its position alone, and how many tokens
a shard has from the length of the sequence. Every rank knows both: growing, keeping the accepted drafts and
taking tokens back need no message, and move nothing that is there already.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np

from treeattn import communicators
from treeattn.agreement import Agreement
from treeattn.attention.positions import Runs, as_runs
from treeattn.attention.shape import DTYPES, Shape
from treeattn.decoder import device as devices
from treeattn.errors import ArgumentError
from treeattn.shards import Layout, parse_layout

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

    from treeattn.token_tree import TokenTree

__all__ = ["ShardedCache"]


class ShardedCache:
    """This rank's part of the keys and values of `batch` sequences, for one layer. Creating it is collective.

    Tokens of a sequence lie in a row; pages (``block_table=``) are the caller's own. What `treeattn.decode`,
    a `Decoder` and `treeattn.token_tree.verify` take of it, without a copy:

    - k, v: [batch, own capacity, kv_heads, head_dim], this rank's shard; valid up to `lengths`.
    - lengths: int64 [batch], valid tokens of this shard; the same array in every step.
    - positions: of this shard's tokens, those to come among them (`treeattn.attention.positions.Runs`).

    And what every rank knows of all: `totals`, int64 [batch], tokens of the whole sequences; `shard_lengths`,
    `owners`.

    Args:
        comm: the ranks.
        batch, kv_heads, head_dim, dtype: as of a `Decoder`.
        capacity: tokens of the longest sequence, on all ranks together.
        layout: which token goes to which rank: a layout of `capacity` tokens (contiguous blocks fill one rank
            after the other; interleaved keeps ranks balanced), or the rank of each position, integers
            [capacity].
        drafts: slots of the largest tree that `propose` takes.
        device: "cpu" or "cuda".

    Raises, on every rank alike:
        ArgumentError: sizes below 1, a layout that does not fit, arguments that differ between ranks.
    """

    def __init__(
        self,
        comm: Intracomm | None = None,
        *,
        batch: int = 1,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        dtype: str = "bfloat16",
        layout: Any = "interleaved",
        drafts: int = 0,
        device: str = "cpu",
    ) -> None:
        comm = communicators.intracomm(comm)
        with Agreement(comm) as agreed:
            shape = Shape(batch, 1, kv_heads, kv_heads, head_dim, dtype)
            for name, value, least in (("capacity", capacity, 1), ("drafts", drafts, 0)):
                if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
                    raise ArgumentError(f"{name} must be a whole number, at least {least}, not {value!r:.60}")
            self._runs = _all_runs(layout, int(capacity), comm.size)
            self.positions = self._runs[comm.rank]
            self._device = devices.find(device)
            self._memory = self._device.memory
            elements = DTYPES[dtype] if device == "cpu" or dtype != "bfloat16" else np.dtype(np.uint16)

            def rows(tokens: int) -> Any:
                return self._memory.empty((batch, tokens, kv_heads, head_dim), elements)

            self.k, self.v = rows(len(self.positions)), rows(len(self.positions))
            self._draft_k, self._draft_v = rows(int(drafts)), rows(int(drafts))
            named = {"batch, kv_heads, head_dim or dtype": shape, "capacity": capacity, "drafts": drafts}
            agreed.must_match = {**named, "layout": tuple(self._runs), "device": device}
        self.capacity, self.rank, self.size = int(capacity), comm.rank, comm.size
        self.totals, self.lengths = np.zeros(batch, np.int64), np.zeros(batch, np.int64)
        self._tree: TokenTree | None = None

    def another(self) -> ShardedCache:
        """An empty cache of the same plan, for another layer. Nothing is sent."""
        other = copy.copy(self)
        for name in ("k", "v", "_draft_k", "_draft_v"):
            own = getattr(self, name)
            setattr(other, name, self._memory.empty(own.shape, own.dtype))
        other.totals, other.lengths = np.zeros_like(self.totals), np.zeros_like(self.lengths)
        other._tree = None
        return other

    @property
    def shard_lengths(self) -> Any:
        """Valid tokens of every rank's shard, int64 [ranks, batch], which nobody has to send."""
        return np.array([runs.all_below(self.totals) for runs in self._runs])

    def owners(self, positions: Any) -> Any:
        """The ranks that these positions belong to, int64. Raises `ArgumentError` beyond the capacity."""
        positions = _whole_numbers("positions", positions)
        if positions.size and not (positions.min() >= 0 and positions.max() < self.capacity):
            outside = int(positions.min() if positions.min() < 0 else positions.max())
            raise ArgumentError(f"position {outside}: the cache has room for {self.capacity}")
        found = np.zeros(positions.shape, np.int64)
        for rank, runs in enumerate(self._runs):
            found[runs.all_below(positions + 1) > runs.all_below(positions)] = rank
        return found

    def draft_positions(self, tree: TokenTree) -> Any:
        """Where the nodes of a tree stand, int64 [batch, L], after the sequence; pads as node 0."""
        return self.totals[:, None] + tree.depths

    def append(self, k: Any, v: Any, counts: Any = None) -> None:
        """Add the next tokens of each sequence: k, v [batch, tokens, kv_heads, head_dim], the same on every
        rank, of which each keeps its own.

        counts: [batch], how many of them each sequence gets; all unless said. Raises `ArgumentError`, and
        then nothing has changed.
        """
        tokens = self._check_rows(k, v)
        counts = self._check_counts(counts, tokens)
        for row, count in enumerate(counts.tolist()):
            begin, chosen = self._own(row, count)
            self._write(row, begin, (k, v), chosen)
        self._grow(counts)

    def append_own(self, k: Any, v: Any, counts: Any) -> None:
        """Add the next `counts` [batch] tokens of each sequence, of which k and v hold this rank's alone:
        [batch, own tokens, kv_heads, head_dim], in order, for rows that get fewer the first ones.

        Raises `ArgumentError`, and then nothing has changed.
        """
        own = self._check_rows(k, v)
        counts = self._check_counts(counts, self.capacity)
        mine = [self._own(row, count) for row, count in enumerate(counts.tolist())]
        most = max(len(chosen) for _, chosen in mine)
        if most != own:
            raise ArgumentError(
                f"k and v hold {own} tokens; of the next {counts.tolist()}, {most} are this rank's"
            )
        for row, (begin, chosen) in enumerate(mine):
            self._write(row, begin, (k, v), np.arange(len(chosen)))
        self._grow(counts)

    def propose(self, draft_k: Any, draft_v: Any, tree: TokenTree) -> None:
        """Hold the keys and values of draft tokens, [batch, L, kv_heads, head_dim], until `commit`.

        They are copied beside the shard, nothing else changes. Raises `ArgumentError` for a tree of another
        batch, or larger than `drafts`.
        """
        if tree.batch != len(self.totals):
            raise ArgumentError(f"the tree has {tree.batch} rows, the cache {len(self.totals)} sequences")
        tokens = self._check_rows(draft_k, draft_v)
        if tokens != tree.nodes or tokens > self._draft_k.shape[1]:
            raise ArgumentError(
                f"drafts of {tokens} tokens for a tree of {tree.nodes} slots: the same number, and at most "
                f"drafts={self._draft_k.shape[1]}, is needed"
            )
        self._draft_k[:, :tokens], self._draft_v[:, :tokens] = draft_k, draft_v
        self._tree = tree

    def commit(self, path: Any) -> None:
        """Append the drafts on a path and forget the others.

        path: [batch, longest] slots of the proposed tree, from the root on, then -1, as `Accepted.path` has
        it; the same on every rank. Nothing is sent, and nothing of the context moves.

        Raises `ArgumentError` for what is no path, or without `propose`; then nothing has changed.
        """
        tree, rows = self._tree, _whole_numbers("path", path)
        if tree is None:
            raise ArgumentError("there are no drafts to commit: propose them first")
        if rows.ndim != 2 or len(rows) != tree.batch:
            raise ArgumentError(f"path is {list(rows.shape)}: slots, then -1, for each of {tree.batch} rows")
        paths = [tree.check_path(row, _until_minus_one(slots)) for row, slots in enumerate(rows)]
        counts = self._check_counts([len(slots) for slots in paths], rows.shape[1])
        for row, slots in enumerate(paths):
            begin, chosen = self._own(row, len(slots))
            self._write(row, begin, (self._draft_k, self._draft_v), slots[chosen])
        self._grow(counts)

    def rollback(self, totals: Any = None) -> None:
        """Forget the proposed drafts and all tokens from `totals` [batch] on; without it, the drafts alone.

        Raises `ArgumentError` for more tokens than there are.
        """
        if totals is not None:
            totals = _whole_numbers("totals", totals)
            right = totals.shape == self.totals.shape
            if not right or (totals < 0).any() or (totals > self.totals).any():
                raise ArgumentError(
                    f"cannot go back to {totals.tolist()} tokens: from 0 to {self.totals.tolist()} are there"
                )
            self._grow(totals.astype(np.int64) - self.totals)
        self._tree = None

    def _own(self, row: int, count: int) -> tuple[int, Any]:
        """Of the next `count` tokens of a sequence: where this rank's go in its shard, and which they are."""
        total = int(self.totals[row])
        begin, end = self.positions.below(total), self.positions.below(total + count)
        return begin, self.positions.positions(begin, end) - total

    def _write(self, row: int, begin: int, given: tuple[Any, Any], chosen: Any) -> None:
        if not len(chosen):
            return
        taken = _as_slice(chosen)
        if taken is None:
            taken = self._device.from_host(chosen)
        for shard, rows in zip((self.k, self.v), given, strict=True):
            shard[row, begin : begin + len(chosen)] = rows[row, taken]

    def _grow(self, counts: Any) -> None:
        self.totals += counts
        self.lengths[...] = [self.positions.below(total) for total in self.totals.tolist()]
        self._tree = None

    def _check_rows(self, k: Any, v: Any) -> int:
        """How many tokens they hold."""
        batch, _, *heads = self.k.shape
        wanted = (batch, k.shape[1] if k.ndim == 4 else 0, *heads)
        for name, array in (("k", k), ("v", v)):
            if tuple(array.shape) != wanted:
                raise ArgumentError(
                    f"{name} has shape {list(array.shape)}: [batch, tokens, kv_heads, head_dim] = "
                    f"[{batch}, any, {heads[0]}, {heads[1]}] is needed, alike for k and v"
                )
            if array.dtype != self.k.dtype:
                raise ArgumentError(f"{name} is {array.dtype}, the cache holds {self.k.dtype}")
        return int(k.shape[1])

    def _check_counts(self, counts: Any, most: int) -> Any:
        counts = np.full(len(self.totals), most) if counts is None else _whole_numbers("counts", counts)
        right = counts.shape == self.totals.shape
        if not right or (counts < 0).any() or (counts > most).any():
            raise ArgumentError(
                f"counts {counts.tolist()}: {len(self.totals)} whole numbers from 0 to {most} are needed"
            )
        if (self.totals + counts > self.capacity).any():
            raise ArgumentError(
                f"{counts.tolist()} more tokens after {self.totals.tolist()} exceed the capacity of "
                f"{self.capacity}: plan a larger cache"
            )
        return counts.astype(np.int64)


def _all_runs(layout: Any, capacity: int, size: int) -> list[Runs]:
    """The positions of every rank's tokens. Raises `ArgumentError`."""
    if isinstance(layout, str | Layout):
        rule = parse_layout(layout) if isinstance(layout, str) else layout
        return [as_runs(rule.runs(capacity, rank, size)) for rank in range(size)]
    owners = np.asarray(layout)
    right = owners.shape == (capacity,) and owners.dtype.kind in "iu"
    if not right or owners.min() < 0 or owners.max() >= size:
        raise ArgumentError(
            f"layout is {owners.dtype} {list(owners.shape)}: a name, or the rank (0 to {size - 1}) of each "
            f"of {capacity} positions"
        )
    return [as_runs(np.flatnonzero(owners == rank)) for rank in range(size)]


def _whole_numbers(name: str, given: Any) -> Any:
    """As an array; one without elements is of any type. Raises `ArgumentError`."""
    try:
        array = np.asarray(given)
    except ValueError as error:
        raise ArgumentError(f"{name}: no array of whole numbers ({error})") from None
    if array.dtype.kind not in "iu" and array.size:
        raise ArgumentError(f"{name} of {array.dtype}: whole numbers are needed")
    return array.astype(np.int64) if array.dtype.kind not in "iu" else array


def _as_slice(ascending: Any) -> slice | None:
    """Numbers with one step between them: a device needs to be sent nothing."""
    steps = np.diff(ascending)
    step = int(steps[0]) if len(steps) else 1
    return slice(int(ascending[0]), int(ascending[-1]) + 1, step) if (steps == step).all() else None


def _until_minus_one(slots: Any) -> Any:
    """What stands before the first -1. Raises `ArgumentError` where more follows."""
    length = int((slots >= 0).sum())
    if (slots[:length] < 0).any() or (slots[length:] != -1).any():
        raise ArgumentError(f"path {slots.tolist()}: slots from the root on, and then nothing but -1")
    return slots[:length]
