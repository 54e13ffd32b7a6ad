"""How sure predictions are: an interval of 95 percent for each time, and for each ratio to another one.

Prices are as wrong as they may be (`collectives.clusters.uncertainty`), the same for every schedule, so that
a price which all pay alike widens no ratio. On top comes what a model misses that has all prices right: the
cluster's own `scatter`, or `BLIND`, which is how far this model is from published runs that it knew nothing
of. Arrivals, if they differ by chance, are drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from statistics import NormalDist
from typing import Any

import msgspec
import numpy as np

from treeattn.collectives.clusters import uncertainty
from treeattn.collectives.clusters.description import Cluster
from treeattn.collectives.clusters.uncertainty import BLIND, MEDIAN

#: Steps that are simulated where they differ by chance.
DRAWS = 16
# 97.5 percent points of Student's t: of 15 degrees of freedom, as draws have; of 10, as about so many kinds
# of probes tell what `scatter` is.
_T_15, _T_10 = 2.131, 2.228
_LEAST = 1e-9  # microseconds: a step of one rank may take none

#: Cluster, number of a draw of arrivals -> microseconds.
Timed = Callable[[Cluster, int], float]


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
        """In words."""
        return f"{_short(self.low)} to {_short(self.high)}"

    @property
    def ratio_interval(self) -> str | None:
        """In words; None for the baseline itself."""
        return None if self.is_baseline else f"{self.ratio_low:.2f} to {self.ratio_high:.2f}"


UNKNOWN = Estimate(*[math.nan] * 6)


def estimates(
    cluster: Cluster,
    timed: Sequence[Timed],
    base: int | None = None,
    noisy: bool = False,
    executors: Collection[str] | None = None,
) -> list[Estimate]:
    """Of each of `timed`. base: which one ratios are to, by default the fastest. noisy: times differ from
    draw to draw, and their median counts. executors: who runs them, if it is known."""

    if not timed:
        return []

    def logs(of: Cluster, draw: int = 0) -> Any:
        return np.log([max(one(of, draw), _LEAST) for one in timed])

    found = logs(cluster)
    covariance = np.zeros((len(timed), len(timed)))
    for of in uncertainty.moved(cluster, executors):
        wrong = (logs(of) - found) / uncertainty.STEP
        covariance += np.outer(wrong, wrong)
    if noisy:
        drawn = np.array([found, *(logs(cluster, draw) for draw in range(1, DRAWS))])
        found = np.median(drawn, axis=0)
        covariance += np.atleast_2d(np.cov(drawn.T))
    together, alone = _model(cluster)
    covariance += together**2 + alone**2 * np.eye(len(timed))
    variances = np.diag(covariance)
    reach = NormalDist().inv_cdf(0.975) if cluster.scatter is None else _T_10
    reach = _T_15 if noisy else reach  # standard deviations from the middle to an end
    of_times = np.exp(reach * np.sqrt(variances))
    base = int(np.argmin(found)) if base is None else base
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
    """What the intervals hold."""
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
    """Three digits."""
    digits = max(0, 2 - math.floor(math.log10(max(value, 0.01))))
    return f"{value:,.{digits}f}"
