"""How sure predictions are: an interval of 95 percent for each time, and for each ratio to another one.

An assumed price is thought to lie within a factor of 2 of what the file says, 19 times of 20, the same for
every schedule, so that a price which all pay the same widens no ratio; one from a source that states no error
is taken as it is. A time is a sum of prices along its critical path: machines are drawn, and each is priced
by that sum, without another simulation (a test holds it to full ones). On top comes what a model misses that
has all prices right: the cluster's own `scatter`, or `BLIND`, which is how far this model is from published
runs that it knew nothing of. Arrivals, if they differ by chance, are drawn along.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from treeattn.collectives.clusters.critical_path import Cost
from treeattn.collectives.clusters.description import Cluster

#: Standard deviation of the logarithm of a price that was not measured.
ASSUMED = math.log(2) / 1.96
#: Of the absolute value of a standard normal number.
MEDIAN = 0.6745
#: Steps that are simulated where they differ by chance: an odd number, so that one of them is the median.
DRAWS = 15
_MACHINES = 1 << 14  # that are drawn
_PROBES = 10  # degrees of freedom: about so many kinds of probes tell what `scatter` is
_LEAST = 1e-9  # microseconds: a step of one rank may take none


#: Errors of predictions of runs of which nothing was given: of times the median and the 90th percentile, of
#: ratios of two schemes the median (benchmarks/published.py --blind, docs/results/published_blind.json).
BLIND, BLIND_P90, BLIND_RATIO = 0.195, 0.433, 0.161


class Estimate(msgspec.Struct, frozen=True):
    """Microseconds that a schedule takes, and its ratio to the baseline; low and high: the ends of their
    intervals. assumed_decides: whether assumed prices, within their factor, decide which is faster."""

    time: float
    low: float
    high: float
    ratio: float
    ratio_low: float
    ratio_high: float
    assumed_decides: bool = False

    @property
    def is_baseline(self) -> bool:
        """Whether ratios are to this one."""
        return self.ratio_low == self.ratio == self.ratio_high == 1

    @property
    def like_the_baseline(self) -> bool:
        """Whether it cannot be told apart from it."""
        return self.ratio_low <= 1 <= self.ratio_high


def estimates(
    cluster: Cluster, costs: Sequence[Cost], drawn: Sequence[Sequence[float]] = ()
) -> list[Estimate]:
    """Estimates of what costs so much on the cluster; ratios are to the fastest. drawn: of each, the
    microseconds of `DRAWS` steps where these differ, draw by draw; their median counts."""
    if not costs:
        return []
    chance = np.random.default_rng(0)
    unsure = sorted({price for one in costs for price, assumed in one.by_price if assumed})
    paid = np.array([[one.by_price.get((price, True), 0.0) for price in unsure] for one in costs])
    known = np.array([one.time for one in costs]) - paid.sum(1)
    factors = np.exp(ASSUMED * chance.standard_normal((_MACHINES, len(unsure))))
    found = np.log(np.maximum(known + paid.sum(1), _LEAST))
    logs = np.log(np.maximum(known + factors @ paid.T, _LEAST))  # of each machine, each schedule
    priced = logs.copy()
    if drawn:
        steps = np.log(np.maximum(drawn, _LEAST))
        logs += steps.T[chance.integers(steps.shape[1], size=_MACHINES)] - found
        found = np.median(steps, axis=1)
    logs += _missed(cluster, chance, len(costs))
    base = int(np.argmin(found))
    first, last = np.quantile(priced - priced[:, [base]], (0.025, 0.975), axis=0)
    low, high = np.exp(np.quantile(logs, (0.025, 0.975), axis=0))
    ratios = np.exp(np.quantile(logs - logs[:, base : base + 1], (0.025, 0.975), axis=0))
    decided = (first < 0) & (last > 0)
    columns = (np.exp(found), low, high, np.exp(found - found[base]), *ratios, decided)
    return [Estimate(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def _missed(cluster: Cluster, chance: np.random.Generator, schedules: int) -> NDArray[np.float64]:
    """Logarithms of what the model misses on each drawn machine: of all schedules together, of each alone."""
    if cluster.scatter is not None:
        drift = cluster.drift * chance.standard_t(_PROBES, (_MACHINES, 1))
        return drift + cluster.scatter * chance.standard_t(_PROBES, (_MACHINES, schedules))
    alone = BLIND_RATIO / MEDIAN / math.sqrt(2)
    together = math.sqrt((BLIND / MEDIAN) ** 2 - alone**2)
    missed = together * chance.standard_normal((_MACHINES, 1))
    return missed + alone * chance.standard_normal((_MACHINES, schedules))


def words(cluster: Cluster, of: Iterable[tuple[str, Estimate]] = ()) -> str:
    """What the intervals account for, in a sentence; and of which schemes assumed prices alone decide whether
    they are faster than the fastest."""
    turned = ", ".join(dict.fromkeys(name for name, one in of if one.assumed_decides))
    decided = f"; assumed prices alone decide whether the fastest is faster than {turned}" if turned else ""
    text = "95 % intervals hold errors of prices, those assumed within a factor of 2, and "
    if cluster.scatter is not None:
        drift = f", {cluster.drift:.0%} all by drift" if cluster.drift else ""
        return f"{text}what predictions on {cluster.name} miss: each {cluster.scatter:.0%}{drift}{decided}"
    return (
        f"{text}what this model misses of published runs that it knew nothing of: half are off by "
        f"{BLIND:.0%}, one in ten by more than {BLIND_P90:.0%} (docs/predicted.md){decided}"
    )
