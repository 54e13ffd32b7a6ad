"""Pairs of ranks exchange and merge, at distance 1, 2, 4, ...: after log2 p rounds all hold the result.

Each round doubles the number of contributions a rank holds. When p is not a power of two, the ranks
beyond the largest power of two first fold into a neighbour and get the result back at the end. Near
pairs go first, so that with blocks of ranks on a node only the last rounds cross nodes. It rests on a
merge that is commutative to the bit: both sides of a pair merge the same two values.

Cost: log2(p) (alpha + n beta), and 2 (alpha + n beta) more if p is not a power of two

Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH",
IJHPCA 2005, section 4.5.
"""

from __future__ import annotations

from treeattn.collectives.combinators import fold_onto, reversed_as_copies, then
from treeattn.collectives.schedule import Schedule, Transfer


def recursive_doubling(size: int) -> Schedule:
    """Exchanges at doubling distance; every rank ends with the result."""
    core_size = 1 << (size.bit_length() - 1)
    core, fold = fold_onto(core_size, size)
    distances = [1 << bit for bit in range(core_size.bit_length() - 1)]
    exchange = tuple(
        tuple(Transfer(core[place], core[place ^ distance]) for place in range(core_size))
        for distance in distances
    )
    return Schedule("recursive_doubling", size, 1, then(fold, exchange, reversed_as_copies(fold)))
