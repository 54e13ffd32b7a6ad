"""Groups of k ranks send to each other at once: mixed-radix recursive doubling.

Ranks are numbers in a mixed radix with the given factors, the nearest neighbours in the first digit. One
round per factor k: the k ranks that differ in that digit only all send to each other and merge k values.
Fewer rounds than recursive doubling for more messages in each. Without factors, the largest number up to p
whose prime factors are at most 7 is split into them (2 * 2 as 4). Ranks beyond the product of the factors
fold into a neighbour first and get the result back at the end. All ranks of a group must fold in the same
order, so this is class C unless every factor is 2.

Cost: sum over factors k of (alpha + (k-1) n beta), and 2 (alpha + n beta) more if ranks fold

Source: Ruefenacht, Bull, Booth, "Generalisation of recursive doubling for AllReduce", Parallel Computing 69
(2017); MPICH's recursive multiplying.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from treeattn.collectives.combinators import fold_onto, reversed_as_copies, then
from treeattn.collectives.schedule import Round, Schedule, Transfer, refuse_above_limit
from treeattn.errors import RestrictionError


def recursive_multiplying(size: int, factors: Sequence[int] | None = None) -> Schedule:
    """Exchanges within groups of k at growing distance; every rank ends with the result."""
    radices = _default_factors(size) if factors is None else tuple(factors)
    core_size = prod(radices)
    if core_size > size:
        raise RestrictionError(
            f"recursive_multiplying: factors={'+'.join(map(str, radices))} multiply to {core_size}, "
            f"more than the {size} ranks; leave factors out to have them chosen"
        )
    refuse_above_limit("recursive_multiplying", size, core_size * sum(k - 1 for k in radices))
    core, fold = fold_onto(core_size, size)
    exchange = []
    distance = 1
    for radix in radices:
        exchange.append(_all_to_all(core, radix, distance))
        distance *= radix
    return Schedule("recursive_multiplying", size, 1, then(fold, exchange, reversed_as_copies(fold)))


def _all_to_all(core: Sequence[int], radix: int, distance: int) -> Round:
    """The ranks that differ only in the digit of weight `distance` send to each other."""
    return tuple(
        Transfer(rank, core[place + (digit - place // distance % radix) * distance])
        for place, rank in enumerate(core)
        for digit in range(radix)
        if digit != place // distance % radix
    )


def _default_factors(size: int) -> tuple[int, ...]:
    for number in range(size, 1, -1):
        rest, found = number, []
        for factor in (4, 2, 3, 5, 7):
            while rest % factor == 0:
                rest //= factor
                found.append(factor)
        if rest == 1:
            return tuple(sorted(found))
    return ()
