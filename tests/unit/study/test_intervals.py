"""Intervals of predictions against what they must be where errors are known."""

from itertools import product
from math import exp, isclose, log

import numpy as np
import pytest
from msgspec.structs import replace
from numpy.random import default_rng

from tests.support.drawn import sample
from treeattn.cli import compare_table
from treeattn.collectives import build, needs_nodes
from treeattn.collectives.clusters import description
from treeattn.collectives.clusters.critical_path import Cost, cost
from treeattn.collectives.clusters.description import Cluster, Executor, Tier
from treeattn.collectives.clusters.placement import block, node_groups
from treeattn.collectives.clusters.simulate import simulate
from treeattn.collectives.schedule import Payload
from treeattn.study.compare.loop import Offset, Times, on_common_clock
from treeattn.study.intervals import ASSUMED, DRAWS, estimates, words


def machine(scatter=0.0, drift=0.0, assumed=()):
    tier = Tier("net", 8, 5.0, 0.0, 0.0, 1e3, assumed=assumed)
    return Cluster(
        "made", "", "net", (tier,), {"mpi": Executor(0.0, 0.0, 1e3)}, "mpi", scatter=scatter, drift=drift
    )


def of_both(cluster):
    """Estimates of 3 and of 6 latencies."""
    schedules = (build(scheme, 8) for scheme in ("recursive_doubling", "k_nomial_tree"))
    runs = [simulate(one, cluster, tuple(range(8)), Payload(1, 1)) for one in schedules]
    return estimates(cluster, list(map(cost, runs)))


REACH = 2.23  # Student's t of 10 degrees of freedom, as which `scatter` and `drift` are known


def width(low, high):
    """Of an interval, in logarithms from its middle."""
    return log(high / low) / 2


def test_prices_that_are_known_leave_nothing_open():
    first, second = of_both(machine())
    assert isclose(first.low, first.high, rel_tol=1e-9)
    assert (second.ratio_low, second.ratio_high) == (pytest.approx(2, rel=1e-3), pytest.approx(2, rel=1e-3))
    assert not second.like_the_baseline
    assert first.is_baseline


def test_a_price_that_all_pay_widens_times_and_no_ratio():
    first, second = of_both(machine(assumed=("latency",)))
    for one in (first, second):
        assert width(one.low, one.high) == pytest.approx(log(2), rel=0.03)
    assert width(second.ratio_low, second.ratio_high) < 1e-3


def test_what_a_model_misses_widens_ratios_and_drift_does_not():
    _, apart = of_both(machine(scatter=0.1))
    _, together = of_both(machine(drift=0.1))
    assert width(apart.low, apart.high) == pytest.approx(REACH * 0.1, rel=0.03)
    assert width(apart.ratio_low, apart.ratio_high) == pytest.approx(REACH * 0.1 * 2**0.5, rel=0.05)
    assert width(together.low, together.high) == pytest.approx(REACH * 0.1, rel=0.03)
    assert width(together.ratio_low, together.ratio_high) < 1e-6
    assert not apart.like_the_baseline
    assert of_both(machine(scatter=0.3))[1].like_the_baseline


def test_arrivals_are_drawn():
    """The median of the draws counts, and ratios are taken within a draw."""
    factors = [exp(0.1 * (draw % 4)) for draw in range(DRAWS)]
    drawn = [[10 * one for one in factors], [20 * one for one in factors]]
    first, second = estimates(machine(), [Cost({("", False): 10.0})] * 2, drawn=drawn)
    assert first.time == pytest.approx(10 * exp(0.1))
    assert width(first.low, first.high) == pytest.approx(0.15)
    assert (second.ratio_low, second.ratio_high) == (pytest.approx(2), pytest.approx(2))


def test_an_order_that_an_assumed_price_decides_is_said():
    """Of three with about one time: twice the price turns the order of two, and never that of the third."""
    paid = [{("a", True): 10.0}, {("a", True): 4.0, ("b", False): 6.5}, {("a", True): 10.5}]
    found = list(zip(("first", "second", "third"), estimates(machine(), list(map(Cost, paid))), strict=True))
    assert [one.assumed_decides for _, one in found] == [False, True, False]
    assert words(machine(), found).endswith(
        "; assumed prices alone decide whether the fastest is faster than second"
    )
    # Asked of the one that arrivals leave fastest.
    late = estimates(machine(), list(map(Cost, paid)), drawn=[[12.0], [11.0], [12.5]])
    assert [one.assumed_decides for one in late] == [True, False, True]
    assert "alone" not in words(machine(), [(name, one) for name, one in found if name != "second"])


def scaled(part, factors):
    """A tier or an executor with fields wrong by factors."""
    return replace(part, **{name: getattr(part, name) * by for name, by in factors.items()})


def priced(cluster, factors):
    """The cluster with prices wrong by factors: of a tier or an executor, and a field of it."""

    def of(name):
        return {key[1]: by for key, by in factors.items() if key[0] == name}

    tiers = tuple(scaled(tier, of(tier.name)) for tier in cluster.tiers)
    executors = {name: scaled(one, of(name)) for name, one in cluster.executors.items()}
    return replace(cluster, tiers=tiers, executors=executors)


MANY_PRICES = product(
    ("frontier", "dgx-h100"), ("k_nomial_tree", "recursive_multiplying", "bine", "hierarchical")
)


@pytest.mark.parametrize(("name", "scheme"), sample(3, MANY_PRICES))
@pytest.mark.slow
def test_of_machines_that_are_drawn_intervals_hold_95_in_100(name, scheme):
    """Within 2 points, by full simulations of 64 ranks: the sum along one critical path is enough."""
    cluster, factors = replace(description.load(name), scatter=0.0, drift=0.0), default_rng(1)
    places = block(cluster, 64)
    schedule = build(scheme, 64, nodes=node_groups(cluster, places) if needs_nodes(scheme) else None)
    (sure,) = estimates(cluster, [cost(simulate(schedule, cluster, places))])
    unsure = [
        (of, field)
        for of, part in [*((tier.name, tier) for tier in cluster.tiers), *cluster.executors.items()]
        for field in part.assumed
        if field != "protocols"  # of longer messages than these
    ]
    held = 0
    for drawn in np.exp(ASSUMED * factors.standard_normal((400, len(unsure)))):
        machine = priced(cluster, dict(zip(unsure, drawn.tolist(), strict=True)))
        held += sure.low <= simulate(schedule, machine, places).time <= sure.high
    assert 0.93 <= held / 400 <= 0.97


@pytest.mark.parametrize("scheme", ["hierarchical", "recursive_doubling", "ring", "k_nomial_tree"])
def test_a_price_that_is_wrong_moves_a_time_by_its_share(scheme):
    """As a simulation with the wrong price has it, of every price of a cluster that lies on the path."""
    cluster, places = description.load("leonardo-booster"), tuple(range(16))
    nodes = [range(at, at + 4) for at in range(0, 16, 4)]
    schedule = build(scheme, 16, nodes=nodes if needs_nodes(scheme) else None)
    found, step = cost(simulate(schedule, cluster, places)), 1e-4
    assert found.time == pytest.approx(simulate(schedule, cluster, places).time)
    checked, linear = 0, ("latency", "overhead", "call", "round", "message", "far_round")
    for (price, _), time in found.by_price.items():
        named = tuple(price.split("."))
        if time and named[1] in linear:
            moved = simulate(schedule, priced(cluster, {named: 1 + step}), places).time
            assert (moved - found.time) / step == pytest.approx(time, rel=0.01, abs=0.01), price
            checked += 1
    assert checked >= 4


def test_how_good_predictions_were_is_summed_up():
    known = [("ring", 10.5, 10.0), ("chain", 20.0, 20.0), ("bine", 10.0, 30.0)]
    rows = [
        {"label": name, "time_us": time, "ratio": time / 10, "predicted_us": predicted,
         "predicted_low_us": 0.9 * predicted, "predicted_high_us": 1.1 * predicted}
        for name, time, predicted in known
    ]  # fmt: skip
    found = compare_table.accuracy([rows])
    assert found["rows"] == 3
    assert found["median"] == pytest.approx(0.5 / 10.5)
    assert found["within_interval"] == pytest.approx(2 / 3)
    assert found["worst_choice"] == pytest.approx(1.05)
    assert compare_table.accuracy([]) == {}


def test_series_of_made_up_instants():
    """Two ranks, two iterations, two parts, by hand; nanoseconds in, microseconds out."""
    first = [[0, 1000, 4000], [10_000, 12_000, 13_000]]
    second = [[2000, 4000, 5500], [9000, 9500, 20_000]]
    samples = Times(np.array([first, second]), 0, 0.0).samples(("early", "late"))
    assert samples == {
        "completion": [5.5, 11.0],
        "after_last_entry": [3.5, 10.0],
        "early": [2.0, 2.0],
        "late": [3.0, 10.5],
    }


def test_offsets_change_linearly_between_comparisons():
    before, after = Offset(1000, 5, 10_000), Offset(3000, 5, 30_000)
    instants = np.array([10_000, 20_000, 30_000], np.int64)
    assert on_common_clock(instants, before, after).tolist() == [11_000, 22_000, 33_000]
