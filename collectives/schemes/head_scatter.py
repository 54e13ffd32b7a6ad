"""Reduce-scatter only: rank r ends with chunk r of the result, and no gather follows.

For consumers that split the query heads over the ranks anyway (tensor parallelism after attention), the
all-gather would be wasted. Rank r keeps partial results for the chunks that lie 0 to h-1 ahead of it, at
first h = p. In each round it hands the upper half of them to the rank that lies ceil(h/2) ahead, which keeps
them as its own lower half. Any p takes ceil(log2 p) rounds and p - 1 chunks sent per rank, the least
possible for both. A range that wraps past the last chunk travels as two transfers.

Cost: ceil(log2 p) alpha + n (p-1)/p beta

Source: Traeff, "Optimal, Non-pipelined Reduce-scatter and Allreduce Algorithms", arXiv:2410.14234 (2024).
"""

from __future__ import annotations

from collections.abc import Iterator

from treeattn.collectives.schedule import Round, Schedule, Transfer


def head_scatter(size: int) -> Schedule:
    """Reduce-scatter in log2 p rounds; rank r ends with chunk r alone."""
    rounds: list[Round] = []
    ahead = size
    while ahead > 1:
        distance = (ahead + 1) // 2
        rounds.append(
            tuple(
                Transfer(rank, (rank + distance) % size, chunks)
                for rank in range(size)
                for chunks in _cyclic_range((rank + distance) % size, ahead - distance, size)
            )
        )
        ahead = distance
    return Schedule("head_scatter", size, size, tuple(rounds), result="scattered")


def _cyclic_range(first: int, count: int, size: int) -> Iterator[range]:
    end = first + count
    yield range(first, min(end, size))
    if end > size:
        yield range(end - size)
