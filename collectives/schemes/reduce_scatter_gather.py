"""Rabenseifner's algorithm: halve the records while reducing, then gather the pieces the same way back.

Partners exchange half of what they still hold and merge the half they keep; after log2 p rounds each rank
holds one complete chunk. The same exchanges in reverse, as copies, leave everything everywhere. Bytes as
few as a ring's, rounds as few as twice recursive doubling. `order=far` starts with partners at distance p/2,
as in the paper; `order=near` starts with neighbours, so that the large messages stay within a node and only
small ones cross. When p is not a power of two, the ranks beyond it fold into a neighbour first.

Cost: 2 log2(p) alpha + 2 n (p-1)/p beta, and 2 (alpha + n beta) more if p is not a power of two

Source: Rabenseifner, "Optimization of Collective Reduction Operations", ICCS 2004; Thakur, Rabenseifner,
Gropp, IJHPCA 2005.
"""

from __future__ import annotations

from treeattn.collectives.combinators import fold_onto, on_chunks, reversed_as_copies, then
from treeattn.collectives.schedule import Round, Schedule, Transfer


def reduce_scatter_gather(size: int, order: str = "far") -> Schedule:
    """Recursive halving, then recursive doubling (Rabenseifner)."""
    core_size = 1 << (size.bit_length() - 1)
    core, fold = fold_onto(core_size, size)
    fold = on_chunks(fold, 0, core_size)
    distances = [1 << bit for bit in range(core_size.bit_length() - 1)]
    if order == "far":
        distances.reverse()
    halve: list[Round] = []
    held = [range(core_size)] * core_size
    for distance in distances:
        halves = [_halves(chunks, bool(place & distance)) for place, chunks in enumerate(held)]
        halve.append(
            tuple(
                Transfer(core[place], core[place ^ distance], given)
                for place, (_, given) in enumerate(halves)
            )
        )
        held = [kept for kept, _ in halves]
    rounds = then(fold, halve, reversed_as_copies(halve), reversed_as_copies(fold))
    return Schedule("reduce_scatter_gather", size, core_size, rounds)


def _halves(chunks: range, upper: bool) -> tuple[range, range]:
    """The half of the chunks that is kept, and the one that is given away."""
    middle = (chunks.start + chunks.stop) // 2
    below, above = range(chunks.start, middle), range(middle, chunks.stop)
    return (above, below) if upper else (below, above)
