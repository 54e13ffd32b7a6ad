"""What a sample of times says, without assuming any distribution of them.

Times on a computer are skewed and have outliers, so nothing here is a mean or a standard deviation
(Hoefler and Belli, "Scientific benchmarking of parallel computing systems", SC 2015, rules 5 and 6).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Statistics", "describe", "median_interval", "quantile"]


@dataclass(frozen=True, slots=True)
class Statistics:
    """A series of times, in the unit of its samples.

    median, p5, p95, p99: over all iterations of all blocks. low, high: the interval that holds the median
    with at least 95 percent confidence, from the medians of the blocks; None below 6 blocks, of which no
    such interval can be made. blocks, count: how many blocks, and iterations in them.
    """

    median: float
    low: float | None
    high: float | None
    p5: float
    p95: float
    p99: float
    blocks: int
    count: int


def quantile(ordered: Sequence[float], fraction: float) -> float:
    """The `fraction` quantile of ascending values, linear between neighbours (Hyndman and Fan's type 7)."""
    place = fraction * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """An interval that holds the median of independent `values` with at least that confidence.

    Each value lies below the true median with probability 1/2, so the number below it is binomial:
    the order statistics k and n + 1 - k enclose it with probability 1 - 2 P(B(n, 1/2) < k), whatever the
    distribution. k is the largest that leaves at least `confidence`; None if not even k = 1 does.
    """
    ordered, count = sorted(values), len(values)
    below, k = 0.0, 0
    while k < count // 2:
        below += math.comb(count, k) / 2**count
        if 1 - 2 * below < confidence:
            break
        k += 1
    return (ordered[k - 1], ordered[count - k]) if k else None


def describe(blocks: Sequence[Sequence[float]]) -> Statistics:
    """The statistics of blocks of iterations. Iterations of one block share a plan and a moment, so they
    are not independent; blocks are the units of the confidence interval. At least one value is needed."""
    medians = [quantile(sorted(block), 0.5) for block in blocks if block]
    pooled = sorted(value for block in blocks for value in block)
    low, high = median_interval(medians) or (None, None)
    p5, median, p95, p99 = (quantile(pooled, fraction) for fraction in (0.05, 0.5, 0.95, 0.99))
    return Statistics(median, low, high, p5, p95, p99, len(medians), len(pooled))
