"""A tree in which rank i merges the ranks at distance d, 2 d, ..., (k-1) d, for d = 1, k, k^2, ...

After the round of distance d, every multiple of k d holds a contiguous run of k d ranks, so neighbours
merge first: with blocks of ranks on a node and k^j ranks per node, each node sends one message out.
Radix 2 is the binomial tree. A larger radix buys fewer rounds for more arrivals in each.

Cost: 2 ceil(log_k p) (alpha + (k-1) n beta)

Source: Thakur, Rabenseifner, Gropp, IJHPCA 2005 (binomial); Wilkins et al., "Generalized Collective
Algorithms for the Exascale Era", CLUSTER 2023 (k-nomial).
"""

from __future__ import annotations

from treeattn.collectives.combinators import reversed_as_copies, then
from treeattn.collectives.schedule import Round, Schedule, Transfer


def k_nomial_tree(size: int, radix: int = 2) -> Schedule:
    """Runs of neighbours merge, radix at a time, to rank 0 and back; radix 2 is the binomial tree."""
    up: list[Round] = []
    distance = 1
    while distance < size:
        parents = range(0, size, radix * distance)
        up.append(
            tuple(
                Transfer(child, parent)
                for parent in parents
                for child in range(parent + distance, min(parent + radix * distance, size), distance)
            )
        )
        distance *= radix
    return Schedule("k_nomial_tree", size, 1, then(up, reversed_as_copies(up)))
