"""As `split_rail`, where nodes hold different numbers of ranks: every rank of every node owns a slice.

Each node cuts the records in as many equal shares as it has ranks, and reduce-scatters them in one round.
The cuts of all nodes together make slices, none of which a node divides; each is reduced across nodes by
the rail scheme over the ranks that own it. A last round copies the shares within each node. In `split_rail`
the smallest node says how many ranks of the others take part; here all do, at the price of more and smaller
messages: a rank of a small node is on several rails. On nodes of one size it is `split_rail`.

Parts are the least common multiple of the sizes, or as many as a plan may have chunks if that is less (a
share is then off by that fraction of the records); records are never cut. Rounds: 2 and those of the rail
scheme. A rank of a node of g sends n/g bytes to each neighbour, twice, and its share n/g through the rail
scheme.

Cost: 2 (alpha + (g-1)/g n beta) within a node of g ranks + the rail scheme on n/g bytes

Source: the asymmetric hierarchy (AHC) of Huawei's HCCL: reduce-scatter in groups of unequal size,
all-reduce across them on slices by the least common multiple, all-gather.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import lcm

from treeattn.collectives.combinators import Share, on_rails
from treeattn.collectives.schedule import TRANSFER_LIMIT, Schedule


def uneven_nodes(size: int, rail: Callable[[int], Schedule], nodes: Sequence[Sequence[int]]) -> Schedule:
    """Every rank reduces a slice across nodes, also where nodes hold different numbers of ranks (AHC).

    `rail` makes a schedule for a number of ranks; `nodes` holds the ranks of each node.
    """
    sizes = [len(node) for node in nodes]
    parts = max(*sizes, min(lcm(*sizes), TRANSFER_LIMIT // rail(len(nodes)).chunks))
    return on_rails("uneven_nodes", nodes, [list(_shares(node, parts)) for node in nodes], rail)


def _shares(node: Sequence[int], parts: int) -> Iterator[Share]:
    for at, rank in enumerate(node):
        yield Share(rank, range(at * parts // len(node), (at + 1) * parts // len(node)))
