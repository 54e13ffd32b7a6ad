"""Reduce within each node, then across one leader per node, then copy back within each node.

The inner scheme gathers each node's ranks at its leader (the first rank of the node); the outer scheme
runs over the leaders alone, so each byte crosses the network once per outer round and not once per
rank; the result is copied back the way it was gathered. Nodes may hold different numbers of ranks.

Cost: inner tree up and down within a node + outer over the leaders

Source: the two-level composition of MPICH (coll/mpir, smp), Open MPI HAN (Luo et al., CLUSTER 2020) and
MSCCLang's hierarchical_allreduce.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

from treeattn.collectives.combinators import on_chunks, on_ranks, reversed_as_copies, side_by_side, then
from treeattn.collectives.schedule import Round, Schedule
from treeattn.errors import RestrictionError


def hierarchical(
    size: int,
    inner: Callable[[int], Schedule],
    outer: Callable[[int], Schedule],
    nodes: Sequence[Sequence[int]],
) -> Schedule:
    """A tree within each node, any scheme across the leaders, and back.

    `inner` and `outer` make a schedule for a number of ranks; `nodes` holds the ranks of each node.
    """
    across = outer(len(nodes))
    if across.result != "replicated":
        raise RestrictionError(
            f"hierarchical: outer={across.name} leaves its result scattered over the leaders; "
            "take one that leaves it on every rank"
        )
    gather = side_by_side(*(on_ranks(_way_up(inner(len(node))), node) for node in nodes))
    up = on_chunks(gather, 0, across.chunks)
    leaders = on_ranks(across.rounds, [node[0] for node in nodes])
    return Schedule("hierarchical", size, across.chunks, then(up, leaders, reversed_as_copies(up)))


def _way_up(tree: Schedule) -> tuple[Round, ...]:
    """A rooted schedule's first half: all its merges, before the copies back down."""
    return tuple(takewhile(lambda round_: round_[0].merge, tree.rounds))
