"""How sure predictions are: an interval of 95 percent for each time, and for each ratio to another one.

An assumed price is thought to lie within a factor of 2 of what the file says, 19 times of 20, the same for
every schedule, so that a price which all pay the same widens no ratio; one from a source that states no error
is taken as it is. What that does to a time is, to first order, the price's share of the critical path. On top
comes what a model misses that has all prices right: the cluster's own `scatter`, or `BLIND`, which is how far
this model is from published runs that it knew nothing of. Arrivals, if they differ by chance, are drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import NormalDist
from typing import NamedTuple

import msgspec
import numpy as np

from treeattn.collectives.clusters.critical_path import Cost
from treeattn.collectives.clusters.description import Cluster

#: Standard deviation of the logarithm of a price that was not measured.
ASSUMED = math.log(2) / 1.96
#: Of the absolute value of a standard normal number.
MEDIAN = 0.6745
#: Steps that are simulated where they differ by chance.
DRAWS = 16
# 97.5 percent points of Student's t: of 15 degrees of freedom, as draws have; of 10, as about so many kinds
# of probes tell what `scatter` is.
_T_15, _T_10 = 2.131, 2.228
_LEAST = 1e-9  # microseconds: a step of one rank may take none


class Blind(NamedTuple):
    """Errors of predictions of runs of which nothing was given: of times their median and 90th percentile,
    of ratios of two schemes the median."""

    median: float
    p90: float
    ratio: float


#: benchmarks/published.py --blind, docs/results/published_blind.json.
BLIND = Blind(0.195, 0.433, 0.161)


class Estimate(msgspec.Struct, frozen=True):
    """Microseconds that a schedule takes, and its ratio to the baseline; low and high: the ends of their
    intervals."""

    time: float
    low: float
    high: float
    ratio: float
    ratio_low: float
    ratio_high: float

    @property
    def is_baseline(self) -> bool:
        """Whether ratios are to this one."""
        return self.ratio_low == self.ratio == self.ratio_high == 1

    @property
    def like_the_baseline(self) -> bool:
        """Whether it cannot be told apart from it."""
        return self.ratio_low <= 1 <= self.ratio_high

    @property
    def interval(self) -> str:
        """The interval in words, in microseconds."""
        return f"{_short(self.low)} to {_short(self.high)}"

    @property
    def ratio_interval(self) -> str | None:
        """The interval of the ratio in words; None for the baseline itself."""
        return None if self.is_baseline else f"{self.ratio_low:.2f} to {self.ratio_high:.2f}"


UNKNOWN = Estimate(*[math.nan] * 6)


def estimates(
    cluster: Cluster, costs: Sequence[Cost], drawn: Sequence[Sequence[float]] = ()
) -> list[Estimate]:
    """Estimates of what costs so much on the cluster; ratios are to the fastest. drawn: of each, the
    microseconds of `DRAWS` steps where these differ, draw by draw; their median counts."""
    if not costs:
        return []
    found = np.log([max(one.time, _LEAST) for one in costs])
    unsure = sorted({price for one in costs for price, assumed in one.by_price if assumed})
    shares = np.array([[one.by_price.get((price, True), 0.0) for price in unsure] for one in costs])
    shares = ASSUMED * shares / np.exp(found)[:, None]
    covariance = shares @ shares.T
    if drawn:
        logs = np.log(np.maximum(drawn, _LEAST))
        found = np.median(logs, axis=1)
        covariance += np.atleast_2d(np.cov(logs))
    together, alone = _model(cluster)
    covariance += together**2 + alone**2 * np.eye(len(costs))
    variances = np.diag(covariance)
    reach = NormalDist().inv_cdf(0.975) if cluster.scatter is None else _T_10
    reach = _T_15 if drawn else reach  # standard deviations from the middle to an end
    of_times = np.exp(reach * np.sqrt(variances))
    base = int(np.argmin(found))
    ratios = np.exp(found - found[base])
    apart = variances + variances[base] - 2 * covariance[base]
    of_ratios = np.exp(reach * np.sqrt(np.maximum(apart, 0)))
    rows = np.stack([
        np.exp(found), np.exp(found) / of_times, np.exp(found) * of_times,
        ratios, ratios / of_ratios, ratios * of_ratios,
    ])  # fmt: skip
    return [Estimate(*row) for row in rows.T.tolist()]


def _model(cluster: Cluster) -> tuple[float, float]:
    """Standard deviations of what the model misses of all schedules together, and of each alone."""
    if cluster.scatter is not None:
        return cluster.drift, cluster.scatter
    alone = BLIND.ratio / MEDIAN / math.sqrt(2)
    return math.sqrt((BLIND.median / MEDIAN) ** 2 - alone**2), alone


def words(cluster: Cluster) -> str:
    """What the intervals account for, in a sentence."""
    text = "95 % intervals hold errors of prices, those assumed within a factor of 2, and "
    if cluster.scatter is not None:
        drift = f", {cluster.drift:.0%} all by drift" if cluster.drift else ""
        return f"{text}what predictions on {cluster.name} miss: each {cluster.scatter:.0%}{drift}"
    return (
        f"{text}what this model misses of published runs that it knew nothing of: half are off by "
        f"{BLIND.median:.0%}, one in ten by more than {BLIND.p90:.0%} (docs/predicted.md)"
    )


def alike(of: Iterable[tuple[str, Estimate]]) -> str:
    """Which schemes are neither faster nor slower than the baseline among them, in words."""
    named = {True: [], False: []}  # type: dict[bool, list[str]]
    for name, estimate in of:
        if estimate.like_the_baseline:
            named[estimate.is_baseline].append(name)
    base, others = " and ".join(named[True]), ", ".join(named[False])
    if not others:
        return f"predicted: all others can be told apart from {base}"
    return f"predicted: cannot be told apart from {base}: {others}"


def _short(value: float) -> str:
    """A number with three digits."""
    digits = max(0, 2 - math.floor(math.log10(max(value, 0.01))))
    return f"{value:,.{digits}f}"
