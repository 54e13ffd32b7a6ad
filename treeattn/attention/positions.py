"""Global positions of a shard's tokens, as a few arithmetic runs.

A shard's tokens have ascending positions in the whole sequence. Contiguous, interleaved and zigzag shards are
one or two runs (start, step, count), so nothing of context size is stored, sent or searched.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from treeattn.errors import ArgumentError

#: Positions, and the ends of intervals of them, are below this: sums of two stay within int64.
MAX_POSITION = 2**60


class Runs:
    """Ascending positions: `table` [runs, 4], int64, C-contiguous, a row each with the index of its first
    token within the shard, its position, the step to the next one, and how many there are."""

    __slots__ = ("_ends", "_key", "_tokens", "table")

    def __init__(self, runs: Iterable[tuple[int, int, int]]) -> None:
        """runs: (start, step, count), ascending; those with no token are left out.

        Raises `ArgumentError` unless positions ascend from 0 on.
        """
        rows, index, above = [], 0, -1
        for start, step, count in runs:
            if count == 0:
                continue
            last = start + step * (count - 1)
            if last >= MAX_POSITION:
                raise ArgumentError(f"position {last} is not served: positions are below 2^60")
            if not (above < start and step > 0 < count):
                raise ArgumentError(
                    f"positions must ascend from 0 on: a run of {count} from {start} in steps of {step} "
                    f"follows position {above}"
                )
            rows.append((index, start, step, count))
            index, above = index + count, last
        self.table = np.array(rows, np.int64).reshape(-1, 4)
        self._ends = [(start + step * (count - 1), index, start, step) for index, start, step, count in rows]
        self._key, self._tokens = tuple(rows), index

    def __len__(self) -> int:
        return self._tokens

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Runs) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"Runs({[(start, step, count) for _, start, step, count in self._key]})"

    @property
    def end(self) -> int:
        """One more than the last position; 0 where there is no token."""
        return self._ends[-1][0] + 1 if self._ends else 0

    def below(self, position: int) -> int:
        """How many tokens have a position below this one."""
        if len(self._ends) > _FEW:
            return int(self.all_below(np.array([position]))[0])
        for last, index, start, step in self._ends:
            if position <= last:
                return index if position <= start else index + -(-(position - start) // step)
        return self._tokens

    def all_below(self, positions: Any) -> Any:
        """`below` of every element of an int64 array."""
        if not self._ends:
            return np.zeros_like(positions)
        index, start, step, count = self.table.T
        run = np.maximum(np.searchsorted(start, positions, side="left") - 1, 0)
        within = -(-(positions - start[run]) // step[run])
        return index[run] + np.clip(within, 0, count[run])

    def positions(self, begin: int = 0, end: int | None = None) -> Any:
        """Positions of the tokens begin..end of the shard, int64 [end - begin]."""
        tokens = np.arange(begin, len(self) if end is None else end)
        run = np.searchsorted(self.table[:, 0], tokens, side="right") - 1
        return self.table[run, 1] + (tokens - self.table[run, 0]) * self.table[run, 2]


_FEW = 8  # runs: a loop over so many is faster than NumPy


def interleaved(rank: int, size: int) -> Runs:
    """The positions of a rank of `size` that take turns, without an end."""
    return Runs([(rank, size, (MAX_POSITION - 1 - rank) // size)])


def as_runs(positions: Any) -> Runs:
    """Runs of what ``positions=`` was given: `Runs`, triples (start, step, count), slices with an end, or an
    ascending array of integers [tokens]. Raises `ArgumentError`."""
    if isinstance(positions, Runs):
        return positions
    if isinstance(positions, slice):
        positions = (positions,)
    if isinstance(positions, Sequence) and positions and all(isinstance(one, slice) for one in positions):
        return Runs(_triple(one) for one in positions)
    if isinstance(positions, Sequence) and all(isinstance(one, tuple) and len(one) == 3 for one in positions):
        return Runs(_whole(one) for one in positions)
    array = np.asarray(positions)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise ArgumentError(
            f"positions are {array.dtype} of shape {list(array.shape)}: ascending whole numbers [tokens], "
            "runs (start, step, count), or a layout"
        )
    if array.size and array.max() >= MAX_POSITION:  # before the difference of two may not fit
        raise ArgumentError(f"position {array.max()} is not served: positions are below 2^60")
    return Runs(_found(array.astype(np.int64)))


def _whole(one: tuple[Any, ...]) -> tuple[int, int, int]:
    try:
        start, step, count = map(operator.index, one)
    except TypeError:
        raise ArgumentError(f"positions {one}: a run is three whole numbers (start, step, count)") from None
    return start, step, count


def _triple(one: slice) -> tuple[int, int, int]:
    start, step = one.start or 0, one.step or 1
    if one.stop is None or step < 1 or start < 0:
        raise ArgumentError(f"positions {one}: a slice needs an end, and a step above 0")
    start, step, stop = _whole((start, step, one.stop))
    return start, step, max(0, -(-(stop - start) // step))


def _found(array: Any) -> list[tuple[int, int, int]]:
    """Longest runs first come, first served: a change of step ends one."""
    runs, begin = [], 0
    steps = np.diff(array)
    changes = [*(np.flatnonzero(np.diff(steps)) + 1).tolist(), len(steps)] if len(array) > 1 else []
    for change in changes:
        if change <= begin:  # the run begins at this very token
            continue
        step = int(steps[begin]) if begin < len(steps) else 1
        runs.append((int(array[begin]), step, change - begin + 1))
        begin = change + 1
    if begin < len(array):
        runs.append((int(array[begin]), 1, 1))
    return runs


def check_owners(everyone: Sequence[Runs]) -> None:
    """Raise `ArgumentError` where two ranks claim a position. everyone: the runs of each rank."""
    rows = [
        (start, start + step * (count - 1), step, rank)
        for rank, runs in enumerate(everyone)
        for _, start, step, count in runs.table.tolist()
    ]
    rows.sort()
    open_: list[tuple[int, int, int, int]] = []
    for row in rows:
        open_ = [other for other in open_ if other[1] >= row[0]]
        for other in open_:
            position = _shared(row, other)
            if position is not None:
                ranks = sorted((row[3], other[3]))
                raise ArgumentError(f"ranks {ranks[0]} and {ranks[1]} both claim position {position}")
        open_.append(row)


def _shared(one: tuple[int, int, int, int], other: tuple[int, int, int, int]) -> int | None:
    """The first position of both runs (start, last, step, ..), by the Chinese remainder theorem."""
    (a, a_last, s, _), (b, b_last, t, _) = one, other
    common = math.gcd(s, t)
    if (b - a) % common:
        return None
    turns = (b - a) // common * pow(s // common, -1, t // common) % (t // common)
    both, position = s * t // common, a + s * turns
    first = max(a, b)
    position += -(-(first - position) // both) * both
    return position if position <= min(a_last, b_last) else None
