"""A complete tree of fan-out k in heap order: the children of rank i are k i + 1 to k i + k.

The deepest level sends first, each parent merging up to k children and its own value at once; then the
result is copied down level by level. A larger radix buys fewer levels for more arrivals at each parent:
the choice between tree depth and fan-out. Heap order scatters a subtree over the ranks, so nearly all
messages cross nodes; `k_nomial_tree` keeps neighbours together.

Cost: about 2 k log_k(p) (alpha + n beta)

Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH",
IJHPCA 2005; radix as a parameter: MPICH's tree algorithms (kary).
"""

from __future__ import annotations

from itertools import pairwise

from treeattn.collectives.combinators import reversed_as_copies, then
from treeattn.collectives.schedule import Schedule, Transfer


def k_ary_tree(size: int, radix: int = 2) -> Schedule:
    """Complete tree of fan-out radix, level by level to rank 0 and back."""
    starts = [0]  # first rank of each level, then the end of the last one
    while starts[-1] < size:
        starts.append(min(size, radix * starts[-1] + 1))
    levels = [range(first, end) for first, end in pairwise(starts)][1:]
    up = tuple(tuple(Transfer(rank, (rank - 1) // radix) for rank in level) for level in reversed(levels))
    return Schedule("k_ary_tree", size, 1, then(up, reversed_as_copies(up)))
