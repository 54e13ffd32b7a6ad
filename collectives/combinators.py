"""Phases of a schedule put together: in sequence, side by side, on other ranks or chunks, on rails."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, pairwise, zip_longest
from typing import NamedTuple

from treeattn.collectives.schedule import Round, Schedule, Transfer, refuse_above_limit
from treeattn.errors import RestrictionError


def fold_onto(core_size: int, size: int) -> tuple[list[int], tuple[Round, ...]]:
    """Gather `size` ranks at `core_size` of them: (the ranks of the core, at most one round of merges).

    For algorithms that need a certain number of ranks. Runs of neighbours, which most likely share a
    node, gather at their first rank; the longer runs come first.
    """
    length, longer = divmod(size, core_size)
    core = [place * length + min(place, longer) for place in range(core_size)]
    ends = [*core[1:], size]
    fold = tuple(
        Transfer(rank, first) for first, end in zip(core, ends, strict=True) for rank in range(first + 1, end)
    )
    return core, (fold,) if fold else ()


def then(*phases: Iterable[Round]) -> tuple[Round, ...]:
    """One phase after the other.

    >>> up = ((Transfer(1, 0),),)
    >>> [[transfer.arrow for transfer in one] for one in then(up, reversed_as_copies(up))]
    [['1->0'], ['0=>1']]
    """
    return tuple(round_ for phase in phases for round_ in phase)


def side_by_side(*phases: Sequence[Round]) -> tuple[Round, ...]:
    """Phases of disjoint ranks or chunks, run at the same time: round i of all of them is one round.

    >>> pair = ((Transfer(1, 0),),)
    >>> [[transfer.arrow for transfer in one] for one in side_by_side(pair, on_ranks(pair, [2, 3]))]
    [['1->0', '3->2']]
    """
    return tuple(tuple(t for part in parts for t in part) for parts in zip_longest(*phases, fillvalue=()))


def on_ranks(rounds: Iterable[Round], ranks: Sequence[int]) -> tuple[Round, ...]:
    """The same rounds with rank i replaced by ``ranks[i]``.

    >>> on_ranks(((Transfer(1, 0),),), [2, 3])[0][0].arrow
    '3->2'
    """
    return tuple(
        tuple(Transfer(ranks[t.src], ranks[t.dst], t.chunks, t.merge) for t in round_) for round_ in rounds
    )


def on_chunks(rounds: Iterable[Round], first: int, width: int = 1) -> tuple[Round, ...]:
    """The same rounds with chunk i replaced by `width` chunks from ``first + i * width`` on.

    >>> on_chunks(((Transfer(1, 0),),), 4, width=2)[0][0].chunks
    range(4, 6)
    """
    return tuple(
        tuple(
            t._replace(chunks=range(first + t.chunks.start * width, first + t.chunks.stop * width))
            for t in round_
        )
        for round_ in rounds
    )


def runs_of(chunks: Iterable[int]) -> Iterator[range]:
    """The chunks, in whatever order, as the longest ranges of neighbours."""
    for _, run in groupby(enumerate(sorted(chunks)), key=lambda place: place[1] - place[0]):
        neighbours = [chunk for _, chunk in run]
        yield range(neighbours[0], neighbours[-1] + 1)


def reversed_as_copies(rounds: Sequence[Round]) -> tuple[Round, ...]:
    """The way back: what was gathered up a tree is copied down the same tree.

    >>> reversed_as_copies(((Transfer(1, 0),),))[0][0].arrow
    '0=>1'
    """
    return tuple(
        tuple(Transfer(t.dst, t.src, t.chunks, False) for t in round_) for round_ in reversed(rounds)
    )


def to_root(schedule: Schedule) -> Schedule:
    """What of a schedule rank 0's result depends on: the first half of a tree, p - 1 messages.

    Rank 0 ends with the bits that it has of the whole schedule; a message of which it needs some chunks alone
    carries these. Raises `RestrictionError` where rank 0 does not get all.

    >>> to_root(collectives.build("recursive_doubling", 4)).messages  # of 8
    3
    """
    if schedule.result == "scattered":
        raise RestrictionError(f"{schedule.name} leaves its result scattered: no rank ends with all of it")
    needed = [0] * schedule.size  # chunks of each rank that count from here on, as bits
    needed[0] = (1 << schedule.chunks) - 1
    kept: list[Round] = []
    for round_ in reversed(schedule.rounds):
        found = tuple(
            t._replace(chunks=chunks)
            for t in round_
            for chunks in _runs(needed[t.dst] & _bits(t.chunks), t.chunks)
        )
        for t in found:
            if not t.merge:
                needed[t.dst] &= ~_bits(t.chunks)
        for t in found:  # all of a round read what stood before it
            needed[t.src] |= _bits(t.chunks)
        if found:
            kept.append(found)
    return replace(schedule, rounds=tuple(reversed(kept)), result="root")


def _bits(chunks: range) -> int:
    return ((1 << len(chunks)) - 1) << chunks.start


def _runs(bits: int, within: range) -> Iterator[range]:
    """The chunks among `within` whose bits are set, as ranges."""
    if bits == _bits(within):
        yield within
        return
    edges = bits ^ (bits << 1)  # set where a run begins, and behind its end
    at = [place for place in range(within.start, within.stop + 1) if edges >> place & 1]
    yield from map(range, at[::2], at[1::2])


class Share(NamedTuple):
    """`rank` reduces this range of the parts for its node, in `on_rails`."""

    rank: int
    parts: range


def on_rails(
    name: str,
    nodes: Sequence[Sequence[int]],
    shares: Sequence[Sequence[Share]],
    rail: Callable[[int], Schedule],
) -> Schedule:
    """In each node every share's rank merges it from the others; shares are reduced across nodes; and back.

    What `split_rail`, `multi_leader` and `uneven_nodes` have in common: they differ in who owns which slice.

    shares: of each node, ascending; those of any node together are all parts. Where nodes cut the parts
    differently, a slice between two cuts goes along one rail, over the ranks whose share holds it. rail:
    makes a schedule for a number of ranks. Raises `RestrictionError` for a rail scheme that scatters its
    result, and for too many transfers.
    """
    size, across = sum(map(len, nodes)), rail(len(nodes))
    if across.result != "replicated":
        raise RestrictionError(
            f"{name}: rail={across.name} leaves its result scattered over the rail; "
            "take one that leaves it on every rank"
        )
    cuts = sorted({bound for node in shares for _, parts in node for bound in (parts.start, parts.stop)})
    within = sum(len(theirs) * (len(node) - 1) for node, theirs in zip(nodes, shares, strict=True))
    refuse_above_limit(name, size, 2 * within + (len(cuts) - 1) * across.messages)
    scatter = tuple(
        Transfer(rank, owner, range(parts.start * across.chunks, parts.stop * across.chunks))
        for node, theirs in zip(nodes, shares, strict=True)
        for owner, parts in theirs
        for rank in node
        if rank != owner
    )
    along = side_by_side(*(_rail(across, shares, first, end) for first, end in pairwise(cuts)))
    phase = (scatter,) if scatter else ()
    return Schedule(name, size, cuts[-1] * across.chunks, then(phase, along, reversed_as_copies(phase)))


def _rail(across: Schedule, shares: Sequence[Sequence[Share]], first: int, end: int) -> tuple[Round, ...]:
    """The parts first .. end - 1 are reduced over those who hold them."""
    ranks = [next(rank for rank, parts in node if first in parts) for node in shares]
    return on_chunks(on_ranks(across.rounds, ranks), first * across.chunks, end - first)
