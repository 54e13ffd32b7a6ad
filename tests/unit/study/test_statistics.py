"""Quantiles against NumPy; the interval against the binomial distribution, and against what it claims."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.drawn import examples
from treeattn.study.statistics import describe, student

FRACTIONS = {"p5": 0.05, "median": 0.5, "p95": 0.95, "p99": 0.99}
BLOCK = st.lists(st.floats(0.001, 1e9), min_size=1, max_size=12)
BLOCKS = st.lists(BLOCK, min_size=1, max_size=12)


def numbers(described):
    return [getattr(described, name) for name in ("median", "low", "high", "p5", "p95", "p99")]


def test_fast_blocks_weigh_no_more_for_having_more_iterations():
    described = describe([[10.0] * 60] * 3 + [[5000.0] * 4] * 7)
    assert (described.median, described.p5, described.p95) == (5000, 10, 5000)
    assert (described.low, described.high) == (10, 5000)  # ranks 2 and 9 of 10
    assert (described.blocks, described.count) == (10, 208)


@examples(100)
@given(BLOCKS, st.lists(st.integers(1, 5), min_size=12, max_size=12))
def test_iterations_that_are_there_twice_change_nothing(blocks, times):
    copied = [block * count for block, count in zip(blocks, times, strict=False)]
    assert numbers(describe(copied)) == numbers(describe(blocks))


@examples(100)
@given(BLOCKS, st.floats(0.001, 1e9))
def test_a_long_block_weighs_as_one(blocks, value):
    assert numbers(describe([*blocks, [value] * 1000])) == numbers(describe([*blocks, [value]]))


@examples(100)
@given(BLOCKS)
def test_the_interval_holds_the_median(blocks):
    described = describe(blocks)
    assert described.p5 <= described.median <= described.p95 <= described.p99
    assert (described.low is None) == (described.high is None) == (len(blocks) < 6)
    if described.low is not None:
        assert described.low <= described.median <= described.high


@examples(100)
@given(st.integers(1, 30).flatmap(lambda size: st.lists(
    st.lists(st.floats(0.001, 1e9), min_size=size, max_size=size), min_size=1, max_size=12
)))  # fmt: skip
def test_blocks_of_equal_lengths_give_the_ordinary_quantiles(blocks):
    described = describe(blocks)
    assert described.median == pytest.approx(np.median(blocks))
    for name, fraction in FRACTIONS.items():
        wanted = np.quantile(blocks, fraction, method="averaged_inverted_cdf")
        assert getattr(described, name) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("count", "ranks"),
    [(6, (1, 6)), (8, (1, 8)), (9, (2, 8)), (10, (2, 9)), (12, (3, 10)), (20, (6, 15)), (50, (18, 33))],
)
def test_the_interval_of_blocks_of_one_value_is_that_of_the_tables(count, ranks):
    values = list(range(1, count + 1))
    np.random.default_rng(0).shuffle(values)
    described = describe([[float(value)] for value in values])
    assert (described.low, described.high) == ranks


@pytest.mark.parametrize("count", range(1, 6))
def test_too_few_blocks_have_no_interval(count):
    described = describe([[float(value), 1.0] for value in range(count)])
    assert described.low is described.high is None


@pytest.mark.parametrize("of_blocks", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("count", [6, 10, 30])
def test_the_interval_holds_the_true_median_as_often_as_it_claims(count, of_blocks):
    """Blocks of 3 to 60 iterations which differ as much as iterations do, less, or not at all."""
    draw = np.random.default_rng(1)
    held = []
    for _ in range(1000):
        blocks = [
            np.exp(of_blocks * draw.standard_normal() + draw.standard_normal(draw.integers(3, 61)))
            for _ in range(count)
        ]
        described = describe(blocks)
        held.append(described.low <= 1 <= described.high)
    assert 0.935 < np.mean(held) < 0.985


@pytest.mark.parametrize(("freedom", "point"), [(5, 2.5706), (9, 2.2622), (29, 2.0452), (10**6, 1.96)])
def teststudents_t_is_that_of_the_tables(freedom, point):
    assert student(freedom) == pytest.approx(point, abs=0.007)


def test_one_value():
    described = describe([[3.0], []])
    assert (described.median, described.p99, described.low, described.high) == (3.0, 3.0, None, None)
    assert (described.blocks, described.count) == (1, 1)
