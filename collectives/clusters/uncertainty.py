"""How sure the prices of a cluster are, and clusters with prices that are as wrong as they may be.

A price is a field of a tier or an executor, ``network.latency``, or a protocol step of a tier,
``network.rendezvous``. `errors` of its table are standard deviations of its logarithm, as a calibration finds
them, and `correlations` of the file say which of them are wrong together: of latency and overhead hardly
more than the sum is known. A price that is only assumed is thought to lie within a factor of 2 of what the
file says, 19 times of 20; one from a source that states no error is taken as it is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs

from treeattn.collectives.clusters.description import PRICES, Cluster, Executor, Tier

#: Standard deviation of the logarithm of a price that nobody measured.
ASSUMED = math.log(2) / 1.96
STEP = 0.1
_TINY = 1e-9
#: Of the absolute value of a standard normal number.
MEDIAN = 0.6745


class Blind(NamedTuple):
    """Errors of predictions of runs of which nothing was given: of times their median and 90th percentile,
    of ratios of two schemes the median."""

    median: float
    p90: float
    ratio: float


#: benchmarks/published.py --blind, docs/results/published_blind.json.
BLIND = Blind(0.195, 0.433, 0.161)


class Price(NamedTuple):
    """A price above 0, in its own unit, and the standard deviation of its logarithm."""

    value: float
    error: float


def prices(cluster: Cluster) -> dict[str, Price]:
    """All prices of a cluster by name. Of protocol steps these are the latencies."""
    found: dict[str, Price] = {}
    for name, table in _tables(cluster):
        for field in table.__struct_fields__:
            value = getattr(table, field)
            if field in PRICES and value:
                found[f"{name}.{field}"] = Price(value, _error(table, field))
        for step in table.protocols if isinstance(table, Tier) else ():
            named = step.name if step.name in table.errors else "protocols"
            found[f"{name}.{step.name}"] = Price(step.latency, _error(table, named))
    return found


def moved(cluster: Cluster, executors: Collection[str] | None = None) -> Iterator[Cluster]:
    """Clusters with prices wrong in one independent way each, `STEP` of its standard deviation. What a time
    differs by in them, divided by `STEP`, are its errors to first order, and independent.

    executors: whose prices matter, by default all.

    Errors of logarithms are normal near what was found alone: of a price that is next to nothing hardly more
    is known, and one that is moved far from it would contradict what was measured.
    """
    unused = set() if executors is None else cluster.executors.keys() - set(executors)
    found = ((name, price.error) for name, price in prices(cluster).items() if price.error)
    unsure = {name: error for name, error in found if name.partition(".")[0] not in unused}
    for way in _ways(cluster, unsure):
        yield _scaled(cluster, dict(zip(unsure, np.exp(STEP * way).tolist(), strict=True)))


def _tables(cluster: Cluster) -> Iterator[tuple[str, Cluster | Tier | Executor]]:
    yield cluster.name, cluster
    yield from ((tier.name, tier) for tier in cluster.tiers)
    yield from cluster.executors.items()


def _error(table: Cluster | Tier | Executor, field: str) -> float:
    error = table.errors.get(field, 0.0)
    return ASSUMED if error is None else error


def _ways(cluster: Cluster, unsure: Mapping[str, float]) -> Any:
    """Independent ways to be wrong, [ways, prices]: logarithms of factors, one standard deviation each.
    Correlations of two digits may not quite fit together: what of them cannot be is left out."""
    at = {name: index for index, name in enumerate(unsure)}
    together = np.eye(len(at))
    for one, others in cluster.correlations.items():
        for other, value in others.items():
            if one in at and other in at:
                together[at[one], at[other]] = together[at[other], at[one]] = value
    deviations = np.array(list(unsure.values()))
    variances, ways = np.linalg.eigh(together * np.outer(deviations, deviations))
    return (ways * np.sqrt(np.maximum(variances, 0))).T[variances > _TINY]


def _scaled(cluster: Cluster, factors: Mapping[str, float]) -> Cluster:
    def changed(name: str, table: Any) -> Any:
        fields: dict[str, Any] = {
            field: getattr(table, field) * factors[f"{name}.{field}"]
            for field in table.__struct_fields__
            if f"{name}.{field}" in factors
        }
        if isinstance(table, Tier):
            fields["protocols"] = tuple(
                structs.replace(step, latency=step.latency * factors.get(f"{name}.{step.name}", 1.0))
                for step in table.protocols
            )
        return structs.replace(table, **fields)

    found: Cluster = structs.replace(
        changed(cluster.name, cluster),
        tiers=tuple(changed(tier.name, tier) for tier in cluster.tiers),
        executors={name: changed(name, executor) for name, executor in cluster.executors.items()},
    )
    return found
