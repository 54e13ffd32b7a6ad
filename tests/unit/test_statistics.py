"""Quantiles and the interval of a median, against NumPy and against the binomial distribution by hand."""

from __future__ import annotations

import numpy as np
import pytest

from treeattn.study.statistics import describe, median_interval, quantile


@pytest.mark.parametrize("fraction", [0, 0.05, 0.5, 0.95, 0.99, 1])
@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_quantiles_are_numpys(count, fraction):
    values = np.sort(np.random.default_rng(count).exponential(size=count))
    assert quantile(values.tolist(), fraction) == pytest.approx(np.quantile(values, fraction))


@pytest.mark.parametrize(
    ("count", "ranks"),
    [(6, (1, 6)), (8, (1, 8)), (9, (2, 8)), (10, (2, 9)), (12, (3, 10)), (20, (6, 15)), (50, (18, 33))],
)
def test_interval_of_the_median_is_that_of_the_tables(count, ranks):
    values = list(range(1, count + 1))
    np.random.default_rng(0).shuffle(values)
    assert median_interval(values) == ranks


@pytest.mark.parametrize("count", range(6))
def test_too_few_blocks_have_no_interval(count):
    assert median_interval(list(range(count))) is None


def test_interval_holds_the_median_as_often_as_it_claims():
    draw = np.random.default_rng(1)
    samples = draw.exponential(size=(4000, 10))
    held = [low <= np.log(2) <= high for low, high in (median_interval(s.tolist()) for s in samples)]
    assert 0.965 < np.mean(held) < 0.99  # 97.9 percent: ranks 2 and 9 of 10


def test_blocks_are_the_units_of_the_interval():
    blocks = [[float(block)] * (block + 1) for block in range(6)]
    described = describe(blocks)
    assert (described.low, described.high, described.blocks, described.count) == (0, 5, 6, 21)
    assert described.median == 4.0  # of all 21 iterations


def test_description_is_numpys_over_all_and_of_medians_over_blocks():
    draw = np.random.default_rng(2)
    blocks = [draw.exponential(size=count) for count in (1, 2, 3, 40, 5, 200, 7)]
    described, pooled = describe([block.tolist() for block in blocks]), np.concatenate(blocks)
    found = described.p5, described.median, described.p95, described.p99
    assert found == pytest.approx(np.quantile(pooled, (0.05, 0.5, 0.95, 0.99)))
    medians = sorted(np.median(block) for block in blocks)
    assert (described.low, described.high) == pytest.approx((medians[0], medians[-1]))
    assert (described.blocks, described.count) == (7, 258)


def test_one_value():
    described = describe([[3.0]])
    assert (described.median, described.p99, described.low, described.high) == (3.0, 3.0, None, None)
