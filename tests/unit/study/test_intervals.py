"""Intervals of predictions against what they must be where errors are known."""

from __future__ import annotations

from math import exp, isclose, log

import pytest
from msgspec.structs import replace

from treeattn.cli import compare_table
from treeattn.collectives import build
from treeattn.collectives.clusters import description, uncertainty
from treeattn.collectives.clusters.description import Cluster, Executor, Tier, as_toml
from treeattn.collectives.clusters.simulate import simulate
from treeattn.collectives.traffic import Payload
from treeattn.errors import ArgumentError
from treeattn.study.intervals import estimates


def machine(scatter=0.0, drift=0.0, **errors):
    tier = Tier("net", 8, 5.0, 0.0, 0.0, 1e3, errors=errors)
    return Cluster(
        "made", "", "net", (tier,), {"mpi": Executor(0.0, 0.0, 1e3)}, "mpi", scatter=scatter, drift=drift
    )


def timed(scheme):
    schedule = build(scheme, 8)
    return lambda cluster, _: simulate(schedule, cluster, tuple(range(8)), Payload(1, 1)).time


REACH = 2.23  # Student's t of 10 degrees of freedom
BOTH = timed("recursive_doubling"), timed("k_nomial_tree")  # 3 and 6 latencies


def width(low, high):
    """Of an interval, in logarithms from its middle."""
    return log(high / low) / 2


def test_prices_that_are_known_leave_nothing_open():
    first, second = estimates(machine(), BOTH)
    assert isclose(first.low, first.high, rel_tol=1e-9)
    assert (second.ratio_low, second.ratio_high) == (pytest.approx(2, rel=1e-3), pytest.approx(2, rel=1e-3))
    assert not second.like_the_baseline
    assert first.ratio_interval is None


def test_a_price_that_all_pay_widens_times_and_no_ratio():
    first, second = estimates(machine(latency=0.1), BOTH)
    for one in (first, second):
        assert width(one.low, one.high) == pytest.approx(REACH * 0.1, rel=0.05)
    assert width(second.ratio_low, second.ratio_high) < 1e-3


def test_what_a_model_misses_widens_ratios_and_drift_does_not():
    _, apart = estimates(machine(scatter=0.1), BOTH)
    _, together = estimates(machine(drift=0.1), BOTH)
    assert width(apart.ratio_low, apart.ratio_high) == pytest.approx(REACH * 0.1 * 2**0.5, rel=0.01)
    assert width(together.low, together.high) == pytest.approx(REACH * 0.1, rel=0.01)
    assert width(together.ratio_low, together.ratio_high) < 1e-6
    assert not apart.like_the_baseline
    assert estimates(machine(scatter=0.3), BOTH)[1].like_the_baseline


def test_noise_is_drawn():
    """Its median counts, and ratios are taken within a draw."""
    noisy = [lambda _, draw: 10 * exp(0.1 * (draw % 4)), lambda _, draw: 20 * exp(0.1 * (draw % 4))]
    first, second = estimates(machine(), noisy, noisy=True)
    assert first.time == pytest.approx(10 * exp(0.15))
    assert width(first.low, first.high) > 0.2
    assert (second.ratio_low, second.ratio_high) == (pytest.approx(2), pytest.approx(2))


def test_of_a_shipped_cluster_what_is_assumed_may_be_wrong_and_nothing_else():
    cluster = description.load("dgx-h100")
    known, wrong = uncertainty.prices(cluster), dict.fromkeys(uncertainty.prices(cluster), 0.0)
    for of in uncertainty.moved(cluster):
        for name, price in uncertainty.prices(of).items():
            wrong[name] += (log(price.value / known[name].value) / uncertainty.STEP) ** 2
    assert {name: pytest.approx(price.error**2) for name, price in known.items()} == wrong
    assert {"nccl.round", "nvlink.gap", "nvlink.copy", "dgx-h100.memory"} <= {
        name for name, price in known.items() if price.error == uncertainty.ASSUMED
    }


def test_how_good_predictions_were_is_summed_up():
    """The third lies outside its interval."""
    known = [("ring", 10.5, 10.0), ("chain", 20.0, 20.0), ("bine", 10.0, 30.0)]
    rows = [
        {"label": name, "time_us": time, "predicted_us": predicted, "predicted_low_us": 0.9 * predicted,
         "predicted_high_us": 1.1 * predicted}
        for name, time, predicted in known
    ]  # fmt: skip
    found = compare_table.accuracy([rows])
    assert found["rows"] == 3
    assert found["median"] == pytest.approx(0.5 / 10.5)
    assert found["within_interval"] == pytest.approx(2 / 3)
    assert found["worst_choice"] == pytest.approx(1.05)
    assert compare_table.accuracy([]) == {}


def test_correlated_prices_are_wrong_together():
    cluster = machine(latency=0.2, bandwidth=0.1)
    cluster = replace(cluster, correlations={"net.bandwidth": {"net.latency": 1.0}})
    (moved,) = uncertainty.moved(cluster)
    tier = moved.tiers[0]
    assert log(tier.latency / 5) == pytest.approx(2 * log(tier.bandwidth / 1e3))


def test_errors_name_prices(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text(as_toml(machine(joins=0.1)))
    with pytest.raises(ArgumentError, match="errors: no price beside it is 'joins'"):
        description.load(path)
