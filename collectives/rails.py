"""Records sliced over the ranks of every node; each slice is reduced across nodes on a rail of its own.

What `split_rail`, `multi_leader` and `uneven_nodes` have in common: they differ in who owns which slice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from treeattn.collectives.schedule import (
    Round,
    Schedule,
    Transfer,
    on_chunks,
    on_ranks,
    refuse_above_limit,
    reversed_as_copies,
    side_by_side,
    then,
)
from treeattn.errors import RestrictionError

__all__ = ["Share", "on_rails"]


class Share(NamedTuple):
    """`rank` reduces this range of the parts for its node."""

    rank: int
    parts: range


def on_rails(
    name: str,
    nodes: Sequence[Sequence[int]],
    shares: Sequence[Sequence[Share]],
    rail: Callable[[int], Schedule],
) -> Schedule:
    """In each node every share's rank merges it from the others; shares are reduced across nodes; and back.

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
