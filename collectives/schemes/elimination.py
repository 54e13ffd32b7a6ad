"""Recursive halving in which three groups become two where their number is odd: no fold before it begins.

At first every rank is a group of its own. In each round, groups of ranks that hold the same chunks join in
pairs: the i-th ranks of both exchange halves, one keeps the lower, the other the upper. Where the number of
groups is odd, the first three join: the two exchange, and each rank of the third sends the lower half of
its chunks to the one and the upper half to the other, and waits for the result (3-2 elimination). What
others fold beforehand, n bytes in a round of its own, thus costs half of what is held by then, in a round
that is needed anyway: nearly nothing for p = 3 * 2^k. The joined three go to the end of the line, so that
no rank is loaded twice until few are left. The same messages in reverse, as copies, gather the chunks.

2 floor(log2 p) rounds, two fewer than with a fold; 2 (p-1) n bytes sent by all ranks together, the least
there is, and less than 3 n by any one; up to 3 n one after the other where a fold has 4 n. Messages: p - 1
and the number of ranks that are still at work, each round, both ways.

Cost: 2 floor(log2 p) alpha + 2 n beta to 3 n beta

Source: after Rabenseifner, Traeff, "More Efficient Reduction Algorithms for Non-Power-of-Two Number of
Processors in Message-Passing Parallel Systems", EuroPVM/MPI 2004, which this extends to several arrivals a
round.
"""

from __future__ import annotations

from treeattn.collectives.combinators import reversed_as_copies, then
from treeattn.collectives.schedule import Round, Schedule, Transfer

# Ranks that hold the same chunks cut in as many blocks as there are ranks: the i-th has the i-th block.
_Group = list[int]


def elimination(size: int) -> Schedule:
    """Recursive halving for any number of ranks: three groups become two where their number is odd."""
    chunks = 1 << (size.bit_length() - 1)
    groups: list[_Group] = [[rank] for rank in range(size)]
    halve: list[Round] = []
    while len(groups) > 1:
        odd = 3 * (len(groups) % 2)
        parts = [groups[at : at + 2] for at in range(odd, len(groups), 2)] + ([groups[:3]] if odd else [])
        halve.append(tuple(transfer for part in parts for transfer in _joining(part, chunks)))
        groups = [[rank for pair in zip(*part[:2], strict=True) for rank in pair] for part in parts]
    return Schedule("elimination", size, chunks, then(halve, reversed_as_copies(halve)))


def _joining(part: list[_Group], chunks: int) -> list[Transfer]:
    """Two groups exchange halves of each block; a third gives both away."""
    lower, upper = part[:2]
    block = chunks // len(lower)
    return [
        Transfer(rank, keeper, range(first, first + block // 2))
        for at in range(len(lower))
        for keeper, first in ((lower[at], at * block), (upper[at], at * block + block // 2))
        for rank in (group[at] for group in part)
        if rank != keeper
    ]
