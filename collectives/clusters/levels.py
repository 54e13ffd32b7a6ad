"""Schemes shaped by nodes, nested: nodes within switches, switches within groups, as many levels as a cluster
has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from treeattn.collectives.clusters.description import Cluster
from treeattn.collectives.clusters.placement import Placement, node_groups

__all__ = ["levels", "nested"]

#: Scheme -> its parameter that holds the scheme of the level further out.
_OUTER = {"hierarchical": "outer", "split_rail": "rail", "multi_leader": "rail"}


def levels(cluster: Cluster, places: Placement) -> list[tuple[int, ...]]:
    """From the nodes outwards: how many units of the level within each unit holds, in order of places.

    Levels that join nothing (one unit in each), or everything, are left out. For nodes in the order of
    `node_groups`.
    """
    units = sorted({place // cluster.slots for place in places})
    found, width = [], cluster.slots
    for tier in range(cluster.node_tier + 1, len(cluster.tiers)):
        inside = cluster.widths[tier] // width
        counts = Counter(unit // inside for unit in units)
        if 1 < len(counts) < len(units):
            found.append(tuple(counts[unit] for unit in sorted(counts)))
            units, width = sorted(counts), cluster.widths[tier]
    return found


def nested(cluster: Cluster, places: Placement) -> Iterator[str]:
    """Schemes of all levels that these places have, as strings, for the groups of `node_groups`; none where
    that is but nodes. With one rank on each node the innermost level is the one further out."""
    outwards = levels(cluster, places)
    alone = len(node_groups(cluster, places)) == len(places)
    if alone and list(places) != sorted(places):  # sizes alone say nothing of ranks out of order
        return
    for scheme, key in _OUTER.items() if outwards else ():
        inner = "recursive_doubling"
        for sizes in reversed(outwards):
            inner = f"{scheme}:nodes={'+'.join(map(str, sizes))}:{key}=({inner})"
        yield inner if alone else f"{scheme}:{key}=({inner})"
