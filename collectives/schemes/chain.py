"""Every rank merges what comes from its right neighbour and passes it on to its left.

Rank p-1 sends to p-2, which merges and sends to p-3, and so on to rank 0; the result is copied back
the same way. The slowest scheme and the simplest: the yardstick for the others, and what NCCL's
"tree" does inside a node.

Cost: 2 (p-1) (alpha + n beta)

Source: the linear algorithm of MPI textbooks; NCCL's intra-node part, src/graph/connect.cc.
"""

from __future__ import annotations

from treeattn.collectives.combinators import reversed_as_copies, then
from treeattn.collectives.schedule import Schedule, Transfer


def chain(size: int) -> Schedule:
    """One neighbour after the other, to rank 0 and back."""
    up = tuple((Transfer(rank, rank - 1),) for rank in range(size - 1, 0, -1))
    return Schedule("chain", size, 1, then(up, reversed_as_copies(up)))
