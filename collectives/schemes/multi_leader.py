"""Several leaders for each node, each for its part of the records, all at work at once.

The records are cut in `leaders` parts. In one round every rank of a node sends each leader its part, which
merges them; the j-th leaders of all nodes reduce part j with the rail scheme; a last round copies the parts
to the ranks of the node. One leader is `hierarchical` with a flat tree; as many as the node has ranks are
`split_rail`. More leaders share out the merges and load more network cards, for more and smaller messages:
the best number lies between for nodes with many ranks. In a node of fewer ranks a rank leads several parts.

Rounds: 2 and those of the rail scheme over the nodes. Messages: 2 l (g-1) in each node of g ranks, l those
of the rail scheme. A leader sends n/l bytes a round of the rail scheme, and n/l to each neighbour in the
end.

Cost: 2 (alpha + (g-1) n/l beta) within a node of g ranks + the rail scheme on n/l bytes

Source: Bayatpour et al., "Scalable Reduction Collectives with Data Partitioning-based Multi-Leader Design"
(DPML), SC 2017; MPICH's multi-leader compositions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from treeattn.collectives.combinators import Share, on_rails
from treeattn.collectives.schedule import Schedule


def multi_leader(
    size: int, leaders: int, rail: Callable[[int], Schedule], nodes: Sequence[Sequence[int]]
) -> Schedule:
    """Each leader of a node reduces its part of the records with its like in other nodes (DPML).

    `rail` makes a schedule for a number of ranks; `nodes` holds the ranks of each node.
    """
    shares = [[Share(node[at % len(node)], range(at, at + 1)) for at in range(leaders)] for node in nodes]
    return on_rails("multi_leader", nodes, shares, rail)
