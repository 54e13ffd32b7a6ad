"""What no schedule can be faster than on a cluster: a floor to see times against, not a time to be reached.

The larger of three. News spreads from a rank within its node no faster than along the optimal tree (Karp et
al., "Optimal broadcast and summation in the LogP model", SPAA 1993), and between nodes no faster than if
each node that knows informed others through all its ranks at once; every rank's result depends on every rank,
so a reduction has to let news spread from each. And bytes: where all ranks end with the result, 2 (n-1)/n
of the payload leave one of n nodes (Patarasuk and Yuan, JPDC 2009), spread over its cards at best.
"""

from __future__ import annotations

import heapq

from treeattn.collectives.clusters.description import Cluster, Executor
from treeattn.collectives.clusters.placement import Placement, node_groups


def lower_bound(
    cluster: Cluster, places: Placement, size: int, executor: Executor, replicated: bool = True
) -> float:
    """Microseconds that a reduction of `size` bytes of each rank takes at the least, with these places."""
    groups = node_groups(cluster, places)
    if len(places) == 1:
        return 0.0
    tiers, outer = range(len(cluster.tiers)), range(cluster.node_tier + 1, len(cluster.tiers))
    widest = max(map(len, groups))
    inner = tiers[: outer.start] if len(groups) == 1 else tiers
    found = _latency(cluster, inner, widest, 1, executor) if widest > 1 else 0.0
    if len(groups) > 1:
        found = max(found, _latency(cluster, outer, len(groups), widest, executor))
        byte = min(_least_byte(cluster, tier) for tier in outer)
        times = 2 if replicated else 1
        found = max(found, times * size * byte * (len(groups) - 1) / len(groups) / cluster.cards)
    return executor.call + executor.round + (executor.far_round if len(groups) > 1 else 0.0) + found


def spread(units: int, senders: int, period: float, delay: float) -> float:
    """When the last of `units` knows what one knows at 0, if each that knows tells `senders` others in every
    `period`, who know it `delay` later."""
    if period <= 0:
        return delay
    known, news = 1, [(delay, senders)]  # when so many more know
    while True:
        now, several = heapq.heappop(news)
        known += several
        if known >= units:
            return now
        heapq.heappush(news, (now + period, several))
        heapq.heappush(news, (now + delay, several * senders))


def _latency(cluster: Cluster, tiers: range, units: int, senders: int, executor: Executor) -> float:
    delay, period = float("inf"), float("inf")
    for tier in tiers:
        link = cluster.link(tier, 0, executor.pulls)
        cost = link.overhead + executor.message
        delay = min(
            delay, 2 * cost + min([link.latency, *(step.latency for step in cluster.tiers[tier].protocols)])
        )
        period = min(period, cost if cluster.tiers[tier].mesh else max(cost, link.gap))
    return spread(units, senders, period, delay)


def _least_byte(cluster: Cluster, tier: int) -> float:
    prices = cluster.tiers[tier]
    rates = [
        prices.bandwidth,
        prices.read_bandwidth or 0,
        *(step.bandwidth or 0 for step in prices.protocols),
    ]
    return 1e-3 / max(rates)
