"""Where ranks sit: a place for each rank, counted through the tiers of a cluster from the inside out."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from treeattn.collectives.clusters.description import Cluster
from treeattn.collectives.schedule import Schedule
from treeattn.errors import ArgumentError

#: Place of each rank.
Placement = tuple[int, ...]


def block(cluster: Cluster, ranks: int) -> Placement:
    """Neighbouring ranks share a node: what most launchers do. Raises `ArgumentError` for too many ranks."""
    _fits(cluster, ranks)
    return tuple(range(ranks))


def cyclic(cluster: Cluster, ranks: int) -> Placement:
    """Ranks are dealt out to as few nodes as hold them, one each in turn. Raises as `block`."""
    _fits(cluster, ranks)
    nodes = -(-ranks // cluster.slots)
    return tuple(rank % nodes * cluster.slots + rank // nodes for rank in range(ranks))


def explicit(cluster: Cluster, places: Sequence[int]) -> Placement:
    """The places as given, one for each rank. Raises `ArgumentError` unless each is there and taken once."""
    twice = [place for place, count in Counter(places).items() if count > 1]
    if twice:
        ranks = [rank for rank, place in enumerate(places) if place == twice[0]]
        raise ArgumentError(
            f"placement: ranks {ranks[0]} and {ranks[1]} both have place {twice[0]}; give each its own"
        )
    outside = [place for place in places if not 0 <= place < cluster.places]
    if outside:
        raise ArgumentError(
            f"placement: {cluster.name} has no place {outside[0]}; places are 0 to {cluster.places - 1}"
        )
    return tuple(places)


def suited(cluster: Cluster, schedule: Schedule) -> Placement:
    """A reordering for a schedule: fills node after node, each time with the rank that exchanges most
    messages with those that the node has already (the lowest of equals). Raises as `block`."""
    _fits(cluster, schedule.size)
    partners: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for transfer in (t for round_ in schedule.rounds for t in round_):
        partners[transfer.src][transfer.dst] += 1
        partners[transfer.dst][transfer.src] += 1
    left, places = dict.fromkeys(range(schedule.size)), [0] * schedule.size
    wanted: Counter[int] = Counter()
    for place in range(schedule.size):
        if place % cluster.slots == 0:
            wanted.clear()
        most = max(wanted.values(), default=0)
        rank = min((r for r, weight in wanted.items() if weight == most), default=next(iter(left)))
        places[rank] = place
        del left[rank]
        wanted.update({other: n for other, n in partners[rank].items() if other in left})
        wanted.pop(rank, None)
    return tuple(places)


#: Name -> place of each rank, for placements that no schedule is asked for.
PLACEMENTS: dict[str, Callable[[Cluster, int], Placement]] = {"block": block, "cyclic": cyclic}


def groups(cluster: Cluster, places: Placement, tier: int) -> tuple[tuple[int, ...], ...]:
    """Ranks of each unit of the tier of that index, ascending, units in order of their places."""
    units: defaultdict[int, list[int]] = defaultdict(list)
    for rank, place in enumerate(places):
        units[place // cluster.widths[tier]].append(rank)
    return tuple(tuple(units[unit]) for unit in sorted(units))


def node_groups(cluster: Cluster, places: Placement) -> tuple[tuple[int, ...], ...]:
    """Ranks of each node: what schemes that are shaped by nodes take."""
    return groups(cluster, places, cluster.node_tier)


def _fits(cluster: Cluster, ranks: int) -> None:
    if ranks > cluster.places:
        counts = " x ".join(f"{tier.joins} ({tier.name})" for tier in cluster.tiers)
        raise ArgumentError(
            f"{cluster.name} has {cluster.places} places, {counts}, for {ranks} ranks: ask for fewer, or "
            "raise joins of the outermost tier in a file of your own"
        )
