"""Split the records over the ranks of each node, reduce each part across nodes on a rail of its own.

In one round the ranks of a node reduce-scatter: rank j of the node merges part j of all its neighbours. Then
the j-th ranks of all nodes reduce part j among themselves with the rail scheme, all rails at once, so that
every network card carries 1/g of the bytes where a leader scheme would load one card with all of them. A last
round copies the parts within each node. There are as many rails as the smallest node has ranks; further
ranks of larger nodes give their records to the rails and receive the result.

Cost: 2 (alpha + n beta) within a node of g ranks + the rail scheme over the nodes on n/g bytes

Source: UCC's split_rail and MSCCLang's hierarchical_allreduce; Cho et al., "BlueConnect", MLSys 2019.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from treeattn.collectives.schedule import (
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


def split_rail(size: int, rail: Callable[[int], Schedule], nodes: Sequence[Sequence[int]]) -> Schedule:
    """Reduce-scatter within each node, one scheme per rail across nodes, all-gather within each node.

    `rail` makes a schedule for a number of ranks; `nodes` holds the ranks of each node.
    """
    across = rail(len(nodes))
    if across.result != "replicated":
        raise RestrictionError(
            f"split_rail: rail={across.name} leaves its result scattered over the rail; "
            "take one that leaves it on every rank"
        )
    rails = min(map(len, nodes))
    refuse_above_limit("split_rail", size, 2 * (size - len(nodes)) * rails + rails * across.messages)
    parts = [range(at * across.chunks, (at + 1) * across.chunks) for at in range(rails)]
    scatter = tuple(
        Transfer(rank, node[at], parts[at])
        for node in nodes
        for at in range(rails)
        for rank in node
        if rank != node[at]
    )
    along = side_by_side(
        *(
            on_chunks(on_ranks(across.rounds, [node[at] for node in nodes]), parts[at].start)
            for at in range(rails)
        )
    )
    within = (scatter,) if scatter else ()
    rounds = then(within, along, reversed_as_copies(within))
    return Schedule("split_rail", size, rails * across.chunks, rounds)
