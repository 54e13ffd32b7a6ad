"""Butterflies whose partners lie 1, 1, 3, 5, 11, 21, .. apart instead of 1, 2, 4, 8, 16, 32, ..

In round s an even rank exchanges with the rank 1 - 2 + 4 - .. (s + 1 terms) ahead of it, an odd one with
the rank as far behind, around a ring of the ranks. Partners are two thirds as far apart as those of a
binomial butterfly, so fewer messages leave a group of neighbours, such as those of a switch, unless its
ranks are an aligned power of two: then `recursive_doubling` sends fewer.

`form=latency` exchanges all records in each of log2 p rounds, as `recursive_doubling` does, but far first:
in this order those who have met are groups that do not overlap, and all ranks merge in one way.
`form=bandwidth` exchanges half of what is still held, near first, and copies the pieces back the same way, as
`reduce_scatter_gather` does: 2 log2 p rounds, 2 n (p-1)/p bytes sent by each rank. What a rank and all whom
it will meet later still hold is one range of chunks, since chunks lie in the order in which the tree of
meetings is walked. Where p is not a power of two, ranks beyond it fold into a neighbour first and get the
result back at the end: two rounds more. Messages: p log2 p, or 2 p log2 p, of the power of two, and 2 for
each rank beyond.

Cost: log2(p) (alpha + n beta), or 2 log2(p) alpha + 2 n (p-1)/p beta; + 2 (alpha + n beta) for folds

Source: De Sensi et al., "Bine Trees: Enhancing Collective Operations by Optimizing Communication Locality",
SC 2025, arXiv:2508.17311; the distances are those of Swing (De Sensi et al., NSDI 2024).
"""

from __future__ import annotations

from treeattn.collectives.combinators import fold_onto, on_chunks, on_ranks, reversed_as_copies, then
from treeattn.collectives.schedule import Round, Schedule, Transfer


def bine(size: int, form: str = "latency") -> Schedule:
    """Butterfly over shorter distances: whole records, or halves and back (binomial negabinary)."""
    core_size = 1 << (size.bit_length() - 1)
    core, fold = fold_onto(core_size, size)
    if form == "latency":
        chunks, exchange = 1, _whole(core_size)
    else:
        chunks, halve = core_size, _halves(core_size)
        exchange = then(halve, reversed_as_copies(halve))
    fold = on_chunks(fold, 0, chunks)
    rounds = then(fold, on_ranks(exchange, core), reversed_as_copies(fold))
    return Schedule("bine", size, chunks, rounds)


def _partner(rank: int, step: int, size: int) -> int:
    distance: int = (1 - (-2) ** (step + 1)) // 3
    return (rank + (-distance if rank % 2 else distance)) % size


def _whole(size: int) -> tuple[Round, ...]:
    """Far first: near first, ranks would merge in unlike orders, and bits would differ."""
    steps = reversed(range(size.bit_length() - 1))
    return tuple(tuple(Transfer(rank, _partner(rank, step, size)) for rank in range(size)) for step in steps)


def _halves(size: int) -> tuple[Round, ...]:
    """In each round a rank gives away the half with its partner's chunk: both halves are aligned blocks."""
    chunk_of = _walked(size)
    rounds: list[Round] = []
    for step in range(size.bit_length() - 1):
        half = size >> (step + 1)
        partners = [_partner(rank, step, size) for rank in range(size)]
        firsts = [chunk_of[partner] // half * half for partner in partners]
        rounds.append(
            tuple(
                Transfer(rank, partner, range(first, first + half))
                for rank, (partner, first) in enumerate(zip(partners, firsts, strict=True))
            )
        )
    return tuple(rounds)


def _walked(size: int) -> dict[int, int]:
    """Rank -> its chunk. After the meetings of a step, a rank goes on with one half and its partner with the
    other: those who still share chunks stand side by side."""
    order = [0]
    for step in range(size.bit_length() - 1):
        order = [rank for met in order for rank in (met, _partner(met, step, size))]
    return {rank: place for place, rank in enumerate(order)}
