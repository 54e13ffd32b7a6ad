"""Every rank talks to its right neighbour only, one chunk at a time, twice around.

Reduce-scatter: chunk c starts at rank c + 1 and is merged at each stop until it is complete at rank c.
All-gather: the complete chunks travel around once more as copies. No rank sends more than 2 n (p-1)/p bytes,
the least possible, but there are 2 (p-1) latencies: for large n and few ranks. Every chunk is merged in
another order, so permuting the records changes bits.

Cost: 2 (p-1) (alpha + n beta / p)

Source: Patarasuk, Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009.
"""

from __future__ import annotations

from treeattn.collectives.combinators import then
from treeattn.collectives.schedule import Round, Schedule, Transfer, refuse_above_limit


def ring(size: int) -> Schedule:
    """Chunks travel around a ring twice: merged, then copied."""
    refuse_above_limit("ring", size, 2 * size * (size - 1))
    chunks = [range(chunk, chunk + 1) for chunk in range(size)]

    def step(ahead: int, merge: bool) -> Round:
        """Each rank passes on the chunk that lies `ahead` of it."""
        return tuple(
            Transfer(rank, (rank + 1) % size, chunks[(rank + ahead) % size], merge) for rank in range(size)
        )

    merges = [step(-1 - number, merge=True) for number in range(size - 1)]
    copies = [step(-number, merge=False) for number in range(size - 1)]
    return Schedule("ring", size, size, then(merges, copies))
