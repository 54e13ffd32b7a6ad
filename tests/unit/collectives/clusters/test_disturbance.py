"""Arrivals, noise and others' traffic: against what they must add, and against words that cannot be."""

from __future__ import annotations

from statistics import fmean, median

import numpy as np
import pytest
from made_clusters import two_tiers, with_executor

from treeattn.collectives import Schedule, Transfer, build
from treeattn.collectives.clusters.disturbance import (
    Arrivals,
    Disturbance,
    Interruptions,
    arrivals,
    noise,
    traffic,
)
from treeattn.collectives.clusters.simulate import simulate
from treeattn.collectives.traffic import Payload
from treeattn.errors import ArgumentError

PLACES = tuple(range(8))


def completion(draws=1, payload=Payload(1, 1000), **fields):  # noqa: B008 - never changed
    cluster = with_executor(two_tiers(4, 2, within=1.0, between=10.0, bandwidth=1.0, cards=2), round=2.0)
    disturbed = Disturbance(**fields)
    runs = (
        simulate(build("recursive_doubling", 8), cluster, PLACES, payload, None, None, disturbed, draw)
        for draw in range(draws)
    )
    return [run.completion for run in runs]


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


def test_arrivals_of_a_measured_trace(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("# measured\n0, 5, 10\n3 0 0\n")
    found = arrivals(str(path))
    assert [found.starts(step, 3) for step in range(3)] == [[0, 5, 10], [3, 0, 0], [0, 5, 10]]
    assert found.text.startswith("trace.csv@")
    with pytest.raises(ArgumentError, match="3 instants for 8 ranks"):
        completion(arrivals=found)
    assert arrivals("0+20us+1ms").given == ((0.0, 20.0, 1000.0),)


def test_a_late_rank_delays_the_step_and_an_early_one_does_not():
    (plain,) = completion()
    (late,) = completion(arrivals=Arrivals("", given=((0.0,) * 7 + (50.0,),)))
    assert late == pytest.approx(plain + 50)
    shifted = Arrivals("", given=((50.0,) * 8,))
    assert completion(arrivals=shifted) == [pytest.approx(plain)]


def test_interruptions_take_their_share_of_what_a_processor_does():
    """Of 10 us in 100 us: work of 1 s takes a tenth more, whatever its pieces; an idle one loses none."""
    processor = Interruptions(noise("10us/100us"), 2, seed=1)
    assert processor.end(0, 0.0, 1e6) == pytest.approx(1.11e6, rel=0.02)
    now = 0.0
    for _ in range(20_000):
        now = processor.end(1, now, 50.0)
    assert now == pytest.approx(1.11e6, rel=0.02)
    begin = now + 1e6
    assert processor.end(1, begin, 0.0) - begin <= 10


def test_noise_and_traffic_delay_and_are_drawn_again():
    (plain,) = completion()
    for few, many in (
        ({"noise": noise("1us/100us")}, {"noise": noise("5us/20us")}),
        ({"traffic": traffic("5%:1Ki")}, {"traffic": traffic("70%:8Ki")}),
    ):
        some, more = completion(30, **few), completion(30, **many)
        assert min(some) >= plain - 1e-9
        assert plain <= median(some) < fmean(more)
        assert len(set(more)) > 20
        assert more == completion(30, **many)


def test_traffic_within_one_node_is_none():
    cluster, pair = two_tiers(1, 8), Schedule("pair", 8, 1, ((Transfer(0, 1),),))
    disturbed = Disturbance(traffic=traffic("90%"))
    assert simulate(pair, cluster, PLACES, disturbed=disturbed).time == simulate(pair, cluster, PLACES).time


def test_a_card_that_others_use_waits_as_a_queue_does():
    """One message of no bytes through a card that is taken half of the time: by Pollaczek and Khinchine it
    waits u / (1 - u) / 2 services at each of the two ends, if less for the second, which sees them spaced."""
    cluster = two_tiers(16, 1, between=1.0, bandwidth=1.0)
    pair = Schedule("pair", 16, 1, ((Transfer(0, 1),),))
    disturbed = Disturbance(traffic=traffic("50%:1000"))
    times = [
        simulate(pair, cluster, tuple(range(16)), Payload(1, 1), disturbed=disturbed, draw=draw).time
        for draw in range(300)
    ]
    assert 1.0 + 0.5 < fmean(times) < 1.0 + 1.2


@pytest.mark.parametrize(
    ("reader", "text"),
    [
        *((arrivals, text) for text in ("", "early:5us", "random", "random:5", "none.csv", "0+5", "5us")),
        *((noise, text) for text in ("10us", "10us/5us", "/", "1/2")),
        *((traffic, text) for text in ("30", "0%", "100%", "30%:0", "30%:64Gi", "-1%")),
    ],
)
def test_words_that_cannot_be(reader, text):
    with pytest.raises(ArgumentError):
        reader(text)
