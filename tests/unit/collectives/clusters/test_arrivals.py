"""Arrivals: against what they must add, and against words that cannot be."""

import numpy as np
import pytest
from made_clusters import two_tiers, with_executor

from treeattn.collectives import build
from treeattn.collectives.clusters.arrivals import arrivals
from treeattn.collectives.clusters.simulate import simulate
from treeattn.collectives.schedule import Payload
from treeattn.errors import ArgumentError


@pytest.mark.parametrize("text", ["random:100us", "exponential:0.1ms", "ascending:100us", "late:100us"])
def test_patterns_of_arrivals(text):
    pattern = arrivals(text)
    steps = np.array([pattern.starts(step, 50) for step in range(200)])
    assert steps.min() >= 0
    assert (steps == [pattern.starts(step, 50) for step in range(200)]).all()
    mean = {"random": 50, "exponential": 100, "ascending": 50, "late": 2}[pattern.pattern]
    assert steps.mean() == pytest.approx(mean, rel=0.1)
    if pattern.pattern == "late":
        assert (np.sort(steps)[:, -2:] == [0, 100]).all()
        assert len(set(steps.argmax(axis=1))) > 25
    else:
        assert pattern.drawn == (pattern.pattern != "ascending")
        assert steps.max() <= (100 if pattern.pattern != "exponential" else 3000)


def test_instants_of_each_rank():
    found = arrivals("0+20us+1ms")
    assert [found.starts(step, 3) for step in range(2)] == [[0.0, 20.0, 1000.0]] * 2
    with pytest.raises(ArgumentError, match="3 instants for 8 ranks"):
        found.check(8)


def test_a_late_rank_delays_the_step_and_an_early_one_does_not():
    cluster = with_executor(two_tiers(4, 2, within=1.0, between=10.0, bandwidth=1.0, cards=2), round=2.0)
    schedule, places = build("recursive_doubling", 8), tuple(range(8))
    together, late, all_late = (
        simulate(schedule, cluster, places, Payload(1, 1000), starts=starts).time
        for starts in (None, [0.0] * 7 + [50.0], [50.0] * 8)
    )
    assert late == pytest.approx(together + 50)
    assert all_late == pytest.approx(together)


@pytest.mark.parametrize("text", ["", "early:5us", "random", "random:5", "none.csv", "0+5", "5us"])
def test_words_that_cannot_be(text):
    with pytest.raises(ArgumentError):
        arrivals(text)
