"""What all layers of a sharded cache have in common: their plan, where tokens lie, and how far sequences have
come.

Where a token lies follows from its position alone, and how many tokens a shard has from the length of the
sequence: every rank knows both of all ranks, and nobody has to be asked. What an operation means for this
rank's shard is the same in every layer, so it is found once, by the first layer that asks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import ArrayLike

from treeattn.attention.positions import Runs, as_runs, interleaved
from treeattn.attention.shape import CACHE_DTYPES, Shape, bits_of
from treeattn.backends.device import Device
from treeattn.errors import ArgumentError
from treeattn.partial import Array
from treeattn.shards import Layout, parse_layout

T = TypeVar("T")


class Placement:
    """Which rank holds which positions.

    own: positions of `rank`; runs: of every rank. limit: how many there are; None where the layout goes on
    for ever.
    """

    def __init__(self, layout: Any, capacity: int, rank: int, size: int) -> None:
        """layout: as a `ShardedCache` takes it. Raises `ArgumentError`."""
        self.limit: int | None = capacity
        if isinstance(layout, str | Layout):
            rule = parse_layout(layout) if isinstance(layout, str) else layout
            self.name = str(rule)
            if rule.name == "interleaved":
                self.limit, self.runs = None, [interleaved(one, size) for one in range(size)]
            else:
                self.runs = [as_runs(rule.runs(capacity, one, size)) for one in range(size)]
        else:
            self.name, self.runs = "position by position", _by_owner(layout, capacity, size)
        self.rank, self.own = rank, self.runs[rank]

    def owners(self, positions: ArrayLike) -> Array:
        """The ranks of these positions, int64. Raises `ArgumentError` for one that is no rank's."""
        positions = whole_numbers("positions", positions)
        least, most = (int(positions.min()), int(positions.max())) if positions.size else (0, 0)
        if least < 0 or most >= (self.limit or most + 1):
            room = "no position is below 0" if least < 0 else f"the cache has room for {self.limit}"
            raise ArgumentError(f"position {least if least < 0 else most}: {room}")
        found = np.zeros(positions.shape, np.int64)
        for rank, runs in enumerate(self.runs):
            found[runs.all_below(positions + 1) > runs.all_below(positions)] = rank
        return found


class Write(NamedTuple):
    """New tokens of some sequences: `chosen` of those that are given go to `into` of the shard. rows: a
    sequence, or all of them; chosen: a slice, or int64 [tokens]."""

    rows: int | slice
    into: slice
    chosen: slice | Array


class Reach:
    """How far the sequences of a cache have come; shared by all layers that have come as far.

    totals: int64 [batch], read-only, tokens of the whole sequences. lengths: int64 [batch], those of this
    rank's shard. longest, most: the largest of either. The last question is remembered with its answer, as
    the next layer asks the same.
    """

    def __init__(self, placement: Placement, totals: Array) -> None:
        self.placement, self.totals = placement, totals
        self.lengths = np.array([placement.own.below(total) for total in totals.tolist()], np.int64)
        self.totals.flags.writeable = self.lengths.flags.writeable = False
        self.most, self.longest = int(self.lengths.max()), int(self.totals.max())
        self._question: object = None
        self._answer: object = None

    @functools.cached_property
    def shard_lengths(self) -> Array:
        """Valid tokens of all ranks, int64 [ranks, batch], read-only."""
        lengths = np.array([runs.all_below(self.totals) for runs in self.placement.runs])
        lengths.flags.writeable = False
        return lengths

    def append(self, given: int, counts: ArrayLike | None, own: bool = False) -> tuple[list[Write], Reach]:
        """What appending the next `counts` [batch] tokens of each sequence writes to this rank's shard, and
        how far the sequences are then. None: as many as are given; `given`: tokens of the arrays they come
        in, which are this rank's alone where `own`. Raises `ArgumentError`."""
        numbers = None if counts is None and not own else whole_numbers("counts", counts)
        return self._once(self._append, numbers, given, own)

    def rollback(self, totals: ArrayLike) -> Reach:
        """Back to `totals` [batch]. Raises `ArgumentError` for more than there are."""
        return self._once(self._rollback, whole_numbers("totals", totals))

    def select(self, rows: ArrayLike) -> tuple[Reach, list[int]]:
        """The sequences `rows`, as a list too. Raises `ArgumentError` for one that is not there."""
        return self._once(self._select, whole_numbers("rows", rows))

    def _once(self, find: Callable[..., T], numbers: Array | None, *more: object) -> T:
        question = find.__name__, more, None if numbers is None else (numbers.shape, numbers.tobytes())
        if question != self._question:
            self._answer = find(numbers, *more)
            self._question = question
        return cast(T, self._answer)

    def _append(self, counts: Array | None, given: int, own: bool) -> tuple[list[Write], Reach]:
        batch, limit = len(self.totals), self.placement.limit
        counts = np.full(batch, given, np.int64) if counts is None else counts
        check_each("counts", counts, batch, None if own else given)
        totals = self.totals + counts
        if limit is not None and (totals > limit).any():
            raise ArgumentError(
                f"{counts.tolist()} more tokens after {self.totals.tolist()} exceed the capacity of {limit}, "
                f"for which the layout ({self.placement.name}) is made: plan a larger cache, or "
                "layout='interleaved', which grows"
            )
        reach = Reach(self.placement, totals)
        ends = reach.lengths.tolist()
        if own and (new := int((reach.lengths - self.lengths).max())) != given:
            raise ArgumentError(
                f"k and v hold {given} tokens; of the next {counts.tolist()}, {new} are this rank's"
            )
        writes = []
        for row, (total, begin, end) in enumerate(
            zip(self.totals.tolist(), self.lengths.tolist(), ends, strict=True)
        ):
            if end > begin:
                numbers = self.placement.own.positions(begin, end) - total
                chosen = slice(0, end - begin) if own else ordered(numbers)
                writes.append(Write(row, slice(begin, end), chosen))
        alike = (self.totals == self.totals[0]).all() and (totals == totals[0]).all()
        if writes and alike:
            writes = [writes[0]._replace(rows=slice(None))]
        return writes, reach

    def _rollback(self, totals: Array) -> Reach:
        if totals.shape != self.totals.shape or (totals < 0).any() or (totals > self.totals).any():
            raise ArgumentError(
                f"cannot go back to {totals.tolist()} tokens: from 0 to {self.totals.tolist()} are there"
            )
        return Reach(self.placement, totals.copy())

    def _select(self, rows: Array) -> tuple[Reach, list[int]]:
        check_rows(rows, len(self.totals))
        return Reach(self.placement, self.totals[rows]), rows.tolist()


class LayerPlan(NamedTuple):
    """shape: of the cache, as of a `Decoder` over it. latent: whether the first channels of k are the values.
    drafts: slots beside each shard."""

    shape: Shape
    latent: bool
    drafts: int
    placement: Placement
    device: Device

    @property
    def elements(self) -> np.dtype[Any]:
        """The type of the arrays; a device without it holds its bits."""
        dtype = str(self.shape.kv_dtype)
        bits = None if self.device.name == "cpu" else bits_of(dtype)
        return np.dtype(bits) if bits else CACHE_DTYPES[dtype]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arrays of a layer."""
        return ("k",) if self.latent else ("k", "v")

    def as_index(self, tokens: slice | Array) -> slice | Array:
        """What `ordered` gave, where the arrays lie."""
        return tokens if isinstance(tokens, slice) else self.device.from_host(tokens)

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels of these arrays."""
        return (self.shape.head_dim, self.shape.v_dim)[: len(self.names)]


def _by_owner(layout: Any, capacity: int, size: int) -> list[Runs]:
    owners = np.asarray(layout)
    right = owners.shape == (capacity,) and owners.dtype.kind in "iu"
    if not right or owners.min() < 0 or owners.max() >= size:
        raise ArgumentError(
            f"layout is {owners.dtype} {list(owners.shape)}: a name, or the rank (0 to {size - 1}) of each "
            f"of {capacity} positions"
        )
    return [as_runs(np.flatnonzero(owners == rank)) for rank in range(size)]


def whole_numbers(name: str, given: ArrayLike | None) -> Array:
    """As int64; an array without elements is of any type. Raises `ArgumentError`."""
    try:
        array = np.asarray(given)
    except ValueError as error:
        raise ArgumentError(f"{name}: no array of whole numbers ({error})") from None
    if array.dtype.kind not in "iu" and array.size:
        raise ArgumentError(f"{name} of {array.dtype}: whole numbers are needed")
    return array.astype(np.int64, copy=False)


def check_each(name: str, numbers: Array, batch: int, most: int | None) -> None:
    """Raise `ArgumentError` unless there is one for each sequence, from 0 on, to `most` if that is said."""
    right = numbers.shape == (batch,) and (numbers >= 0).all()
    if not right or (most is not None and (numbers > most).any()):
        upto = "on" if most is None else f"to {most}"
        said = f"{name} {numbers.tolist()!r:.60}"
        raise ArgumentError(f"{said}: {batch} whole numbers from 0 {upto} are needed")


def check_rows(rows: Array, batch: int) -> None:
    """Raise `ArgumentError` unless they are numbers of sequences, at least one."""
    if rows.ndim != 1 or not rows.size or (rows < 0).any() or (rows >= batch).any():
        raise ArgumentError(
            f"rows {rows.tolist()}: numbers of the {batch} sequences, 0 to {batch - 1}, are needed"
        )


def ordered(numbers: Array) -> slice | Array:
    """As a slice where there is one step between them: a device needs to be sent nothing."""
    steps = np.diff(numbers)
    step = int(steps[0]) if len(steps) else 1
    alike = step > 0 and (steps == step).all()
    return slice(int(numbers[0]), int(numbers[-1]) + 1, step) if alike else numbers
