"""Schemes shaped by nodes, nested: sockets within nodes, nodes within switches, switches within groups, as
many levels as a cluster has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from treeattn.collectives.clusters.description import Cluster
from treeattn.collectives.clusters.placement import Placement, groups

#: Scheme -> its parameter that holds the scheme of the level further out.
_OUTER = {"hierarchical": "outer", "split_rail": "rail", "multi_leader": "rail"}


class Nested(NamedTuple):
    """A scheme string for groups of ranks, which are those of each unit of a tier. tier: its name."""

    text: str
    groups: tuple[tuple[int, ...], ...]
    tier: str


def levels(cluster: Cluster, places: Placement, within: int) -> list[tuple[int, ...]]:
    """From the units of a tier outwards: how many units of the level within each unit holds, in order of
    places.

    within: index of the tier. Levels that join nothing (one unit in each), or everything, are left out.
    """
    width = cluster.widths[within]
    units = sorted({place // width for place in places})
    found = []
    for tier in range(within + 1, len(cluster.tiers)):
        inside = cluster.widths[tier] // width
        counts = Counter(unit // inside for unit in units)
        if 1 < len(counts) < len(units):
            found.append(tuple(counts[unit] for unit in sorted(counts)))
            units, width = sorted(counts), cluster.widths[tier]
    return found


def nested(cluster: Cluster, places: Placement) -> Iterator[Nested]:
    """Schemes of all levels that these places have; none where that is but nodes.

    Innermost are nodes, and then each tier within nodes of which one holds several units and a unit several
    ranks. With one rank on each node the innermost level is the one further out.
    """
    nodes = groups(cluster, places, cluster.node_tier)
    for tier in range(cluster.node_tier, -1, -1):
        outwards = levels(cluster, places, tier)
        inside = tier < cluster.node_tier
        if len(nodes) < len(groups(cluster, places, tier)) < len(places) if inside else outwards:
            yield from _of(cluster, places, tier, outwards)


def _of(cluster: Cluster, places: Placement, tier: int, outwards: list[tuple[int, ...]]) -> Iterator[Nested]:
    members = groups(cluster, places, tier)
    alone = len(members) == len(places)
    if alone and list(places) != sorted(places):  # sizes alone say nothing of ranks out of order
        return
    for scheme, key in _OUTER.items():
        inner = "recursive_doubling"
        for sizes in reversed(outwards):
            inner = f"{scheme}:nodes={'+'.join(map(str, sizes))}:{key}=({inner})"
        text = inner if alone else f"{scheme}:{key}=({inner})"
        yield Nested(text, members, cluster.tiers[tier].name)
