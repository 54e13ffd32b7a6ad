"""What a sample of times says, without assuming any distribution of them.

Times on a computer are skewed and have outliers, so nothing here is a mean or a standard deviation of them
(Hoefler and Belli, "Scientific benchmarking of parallel computing systems", SC 2015, rules 5 and 6).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

FEWEST_BLOCKS = 6  # whose smallest and largest of a value enclose its median with 95 percent confidence
_ROUNDING = 1e-9  # of sums of weights, far below the weight of one iteration


@dataclass(frozen=True, slots=True)
class Statistics:
    """A series of times, in the unit of its samples.

    All of it describes one thing: an iteration drawn at random from a block drawn at random, so that every
    block weighs the same, however many iterations the time allowed it. median, p5, p95, p99: of that
    distribution. low, high: the interval of that median at 95 percent confidence; None below 6 blocks.
    blocks, count: how many blocks, and iterations in them.
    """

    median: float
    low: float | None
    high: float | None
    p5: float
    p95: float
    p99: float
    blocks: int
    count: int


def describe(blocks: Sequence[Sequence[float]]) -> Statistics:
    """The statistics of blocks of iterations; at least one value is needed, blocks without any do not count.

    An iteration weighs 1 / the length of its block. Quantiles invert the weighted distribution, and lie in
    the middle where it is level (Hyndman and Fan, "Sample quantiles in statistical packages", The American
    Statistician 50(4), 1996, definition 2): blocks of equal lengths give the ordinary median.

    Iterations of one block share a plan and a moment, so they are not independent; blocks are. The interval
    is that of a median in a sample of clusters (Woodruff, "Confidence intervals for medians and other
    position measures", JASA 47(260), 1952): the share of a block that lies below the median varies from
    block to block, the mean share is therefore known to t s / sqrt(blocks), and the quantiles at one half
    minus and plus so much are the ends. Blocks of one value each give the exact binomial interval.
    """
    lengths = np.array([len(block) for block in blocks if len(block)])
    count = len(lengths)
    values = np.concatenate([block for block in blocks if len(block)])
    order = np.argsort(values, kind="stable")
    values, of_block = values[order], np.repeat(np.arange(count), lengths)[order]
    weights = np.repeat(1 / (count * lengths), lengths)[order]
    up_to = np.cumsum(weights)

    def quantile(fraction: float) -> float:
        places = np.searchsorted(up_to, [fraction - _ROUNDING, fraction + _ROUNDING])
        low, high = values[np.minimum(places, len(values) - 1)]
        return float(low + high) / 2

    low = high = None
    if count >= FEWEST_BLOCKS:
        below_the_median = np.clip(0.5 - (up_to - weights), 0, weights)
        shares = count * np.bincount(of_block, below_the_median, count)
        margin = student(count - 1) * float(shares.std(ddof=1)) / math.sqrt(count)
        low, high = quantile(0.5 - margin), quantile(0.5 + margin)
    p5, median, p95, p99 = map(quantile, (0.05, 0.5, 0.95, 0.99))
    return Statistics(median, low, high, p5, p95, p99, count, len(values))


def student(freedom: int) -> float:
    """The 97.5 percent point of Student's t, from 5 degrees of freedom on to 0.007: Wallace, "Bounds on
    normal approximations to Student's and the chi-square distributions", Ann. Math. Statist. 30(4), 1959.
    """
    normal = NormalDist().inv_cdf(0.975) * (8 * freedom + 3) / (8 * freedom + 1)
    return math.sqrt(freedom * math.expm1(normal**2 / freedom))
