"""A tree for each chunk, all at once: merged up to the chunk's rank near first, copied back down far first.

The binomial tree of chunk c has its root at rank c; the rank o places beyond belongs under the one o - d
places beyond, d being the lowest bit of o. In the round of distance d = 1, 2, 4, .. each rank sends, to the
rank d before it, what it has gathered for all trees in which it has yet to send: half of the chunks in the
first round, one in the last. So many bytes go to neighbours and few go far, where `circulant` sends half of
the records over half of the ring. The same messages in reverse, as copies, are the all-gather.

2 ceil(log2 p) rounds for any p; every rank sends and receives 2 (p-1) chunks of n/p bytes. Chunks lie in
the order of their reversed bits, in which those that travel together are neighbours while 2 d divides p:
one message each. Other distances take one message for each range: 2 p log2 p messages in all for powers of
two, up to 2 p (p-1) for odd p.

Cost: 2 ceil(log2 p) alpha + 2 n (p-1)/p beta

Source: Jeaugey, "PAT: a new algorithm for all-gather and reduce-scatter operations at scale",
arXiv:2506.20252 (2025), with room for all chunks; NCCL's PAT. Both halves together make an all-reduction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from treeattn.collectives.combinators import reversed_as_copies, runs_of, then
from treeattn.collectives.schedule import Schedule, Transfer, refuse_above_limit


def all_gather_trees(size: int) -> Schedule:
    """A binomial tree for each chunk, all at once: reduced near first, all-gathered far first (PAT)."""
    steps = (size - 1).bit_length()
    distances = [1 << step for step in range(steps)]
    most = [1 if size % (2 * d) == 0 else len(range(d, size, 2 * d)) for d in distances]
    refuse_above_limit("all_gather_trees", size, 2 * size * sum(most))
    order = sorted(range(size), key=lambda rank: f"{rank:0{steps}b}"[::-1])
    place = dict(zip(order, range(size), strict=True))
    up = tuple(
        tuple(
            Transfer(rank, (rank - distance) % size, chunks)
            for rank in range(size)
            for chunks in _sent(rank, distance, place)
        )
        for distance in distances
    )
    return Schedule("all_gather_trees", size, size, then(up, reversed_as_copies(up)))


def _sent(rank: int, distance: int, place: Mapping[int, int]) -> Iterator[range]:
    """The chunks of all trees in which `rank` lies an odd multiple of `distance` beyond the root."""
    size, period = len(place), 2 * distance
    if size % period == 0:  # all chunks of one remainder, of which the smallest stands first
        first = place[(rank - distance) % period]
        return iter([range(first, first + size // period)])
    return runs_of(place[(rank - beyond) % size] for beyond in range(distance, size, period))
