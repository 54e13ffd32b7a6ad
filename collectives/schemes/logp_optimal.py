"""The tree that is built greedily: each rank that has the result sends it on to one more as soon as it may.

In the LogP model a message costs its sender `overhead`, is under way for `latency`, and costs its receiver
`overhead`; a rank starts its next message `gap` after the last (or `overhead`, if that is longer). Whoever
is free first sends to the next rank that has nothing. No tree reaches all ranks sooner, and the same tree
run backwards gathers in the same time, merges not counted. Where `gap` is small against the rest, ranks have
many children (all p-1 in the extreme); `latency` + 2 `overhead` = `gap` makes the binomial tree. Numbers
are in any one unit: ratios decide. Defaults, in nanoseconds: those of MPICH's topology-aware tree, overhead
200 and latency 1600 for nodes of one switch; it has no gap, for which stands about what 8 KB take at 25
GB/s, and the overhead.

A subtree is a run of neighbours, the smallest nearest to its parent. Rounds: one for each level of the
tree, each way; 2 (p-1) messages of n bytes; a rank merges what comes from all its children in one round.

Cost: 2 T(p), the least t with f(t) = p: f(t) = 1 while t < L + 2 o, then f(t - g) + f(t - L - 2 o)

Source: Karp, Sahay, Santos, Schauser, "Optimal broadcast and summation in the LogP model", SPAA 1993;
defaults: MPIR_CVAR_ALLREDUCE_TOPO_OVERHEAD and _SAME_SWITCHES of MPICH.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from treeattn.collectives.combinators import reversed_as_copies, then
from treeattn.collectives.schedule import Schedule, Transfer


def logp_optimal(size: int, latency: int = 1600, overhead: int = 200, gap: int = 500) -> Schedule:
    """The tree that is soonest done for given latency, overhead and gap of messages (LogP)."""
    children = _greedy(size, latency + 2 * overhead, max(gap, overhead))
    levels: list[list[Transfer]] = []
    for level, child, parent in _numbered(children):
        if level == len(levels):
            levels.append([])
        levels[level].append(Transfer(child, parent))
    # What a rank sends first, on the way down, goes to its largest subtree, whose numbers are the highest.
    up = tuple(tuple(sorted(found, key=lambda t: (t.dst, -t.src))) for found in reversed(levels))
    return Schedule("logp_optimal", size, 1, then(up, reversed_as_copies(up)))


def _greedy(size: int, delivery: int, interval: int) -> list[list[int]]:
    """The children of each rank in the order in which it sends to them; ranks in the order of arrival."""
    children: list[list[int]] = [[] for _ in range(size)]
    free = [(0, 0)]  # (time, rank) of who may send next
    for child in range(1, size):
        time, parent = heappop(free)
        children[parent].append(child)
        heappush(free, (time + interval, parent))
        heappush(free, (time + delivery, child))
    return children


def _numbered(children: list[list[int]]) -> Iterator[tuple[int, int, int]]:
    """(level, child, parent) of each rank but the root, numbered so that a subtree is a run of numbers."""
    waiting = [(0, 0, child) for child in children[0]]  # the child that was sent to last is numbered first
    number = 0
    while waiting:
        level, parent, rank = waiting.pop()
        number += 1
        yield level, number, parent
        waiting += [(level + 1, number, child) for child in children[rank]]
