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

from treeattn.collectives.combinators import Share, on_rails
from treeattn.collectives.schedule import Schedule


def split_rail(size: int, rail: Callable[[int], Schedule], nodes: Sequence[Sequence[int]]) -> Schedule:
    """Reduce-scatter within each node, one scheme per rail across nodes, all-gather within each node.

    `rail` makes a schedule for a number of ranks; `nodes` holds the ranks of each node.
    """
    rails = min(map(len, nodes))
    shares = [[Share(node[at], range(at, at + 1)) for at in range(rails)] for node in nodes]
    return on_rails("split_rail", nodes, shares, rail)
