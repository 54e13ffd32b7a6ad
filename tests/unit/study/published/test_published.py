"""Published times: what is read, sums up and is fitted, and that a held run's own times stay unseen."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import numpy as np
import pytest

from treeattn.collectives import build
from treeattn.collectives.clusters import description
from treeattn.collectives.clusters.description import as_toml
from treeattn.collectives.clusters.placement import block
from treeattn.collectives.clusters.simulate import simulate
from treeattn.collectives.traffic import Payload
from treeattn.errors import ArgumentError
from treeattn.study.published.held import (
    Predicted,
    given,
    held_out,
    ratio_error,
    score,
    two_parameters,
    winners,
)
from treeattn.study.published.measurements import ELEMENT, SHIPPED, Files, Measurement, Run, read
from treeattn.study.published.prices import Fit, Prices, resemblance
from treeattn.study.published.rounds import hops_and_load, sums

ROOT = Path(__file__).resolve().parents[4]
HEADER = (
    "system,run,nodes,ppn,ranks,library,collective,algorithm,bytes,iterations,median_us,p5_us,p95_us,min_us\n"
)


@pytest.fixture(scope="module")
def shipped():
    return read(SHIPPED)


def line(algorithm="ring_ompi", size=4096, time=10.0, ppn=1, collective="allreduce", library="OMPI 4.1.6"):
    return f"mars,2030_01_02___03_04_05,8,{ppn},8,{library},{collective},{algorithm},{size},9,{time},1,2,1\n"


def written(tmp_path, text, name="m.csv"):
    path = tmp_path / name
    path.write_text(text)
    return Files([path])


def test_what_is_shipped(shipped):
    scored = [row for row in shipped if row.predicted]
    assert {row.run.system for row in scored} == {"leonardo", "lumi", "fugaku"}
    assert len({row.run for row in scored}) == 15
    assert not [row for row in shipped if "not_applied" in row.algorithm or "CUDA" in row.run.library]
    assert {row.run.shape for row in scored if row.run.system == "fugaku"} == {(2, 2, 2), (8, 8, 8), (64, 64)}
    assert {row.scheme for row in scored} == {
        "recursive_doubling",
        "ring",
        "reduce_scatter_gather:order=near",
    }


def test_what_counts(tmp_path):
    lines = [
        line(),
        line("recursive_doubling_over"),
        line("default_ompi"),
        line("not_applied:ring_ompi"),
        line(ppn=4),
        line(size=128),
        line(size=2 << 20),
        line(collective="reduce"),
        line(library="OMPI 4.1.6 CUDA 12.1"),
        line("bine_lat_over"),
    ]
    rows = read(written(tmp_path, HEADER + "".join(lines)))
    assert [(row.algorithm, row.predicted) for row in rows] == [
        ("ring_ompi", True), ("recursive_doubling_over", True), ("bine_lat_over", False),
    ]  # fmt: skip
    packed = tmp_path / "m.csv.gz"
    packed.write_bytes(gzip.compress((tmp_path / "m.csv").read_bytes()))
    assert read(Files([packed])) == rows


def test_a_ring_of_fewer_elements_than_ranks_is_recursive_doubling(tmp_path):
    text = HEADER + line(size=256).replace(",8,1,8,", ",128,1,128,")
    (row,) = read(written(tmp_path, text))
    assert row.scheme == "recursive_doubling"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b\n1,2\n", "no column 'system': it is a file of another kind"),
        (HEADER + line(time="soon"), "line 2: Expected `float`.*median_us"),
        (HEADER + line(time=-1.0), "line 2: median_us -1.0 is no measurement"),
        (HEADER + "mars,1\n", "line 2: not as many cells"),
    ],
)
def test_files_of_another_kind(tmp_path, text, words):
    with pytest.raises(ArgumentError, match=words) as caught:
        read(written(tmp_path, text))
    assert "m.csv" in str(caught.value)


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"a,b\n1,2\n")[:-9])
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, words in (("none.csv", "cannot be read"), ("cut.gz", "neither CSV"), ("binary", "neither CSV")):
        with pytest.raises(ArgumentError, match=words):
            read(Files([tmp_path / name]))


RUN = Run("2030_01_02___03_04_05", 16, "mars", "OMPI 4.1.6")


def row(scheme, size, run=RUN, algorithm=None, time=1.0):
    name = {"recursive_doubling": "recursive_doubling_ompi", "ring": "ring_ompi"}.get(
        scheme, "rabenseifner_ompi"
    )
    return Measurement(run, algorithm or name, scheme, size, time, True)


NEAR = "reduce_scatter_gather:order=near"


def test_sums_by_hand():
    found = sums(row("recursive_doubling", 1024))
    assert found.rounds == (0, 4, 0, 0)
    assert (found.sent, found.merged) == (4096, 4096)
    halves = sums(row(NEAR, 1024))
    assert halves.rounds == (4, 4, 0, 0)  # 512 and 256, then 128 and 64 bytes, and back
    assert halves.sent == 2 * 1024 * 15 / 16
    assert halves.merged == 1024 * 15 / 16


def test_the_ring_is_summed_as_its_schedule():
    found = sums(row("ring", 1 << 16))
    schedule = build("ring", 16)
    sent = sum(max(len(t.chunks) for t in round_) for round_ in schedule.rounds) * (1 << 16) / 16
    assert found.all_rounds == len(schedule.rounds)
    assert found.sent == sent
    assert found.merged == sent / 2


def test_groups_are_left():
    run = RUN._replace(groups=("a",) * 8 + ("b",) * 8)
    assert sum(sums(row("recursive_doubling", 64, run)).leaving) == 1  # the last of four rounds
    assert sum(sums(row("ring", 1 << 16, run)).leaving) == 30


def test_torus_by_hand():
    assert hops_and_load((), [(0, 1)]) == (0, 0)
    assert hops_and_load((8,), [(r, r ^ 1) for r in range(8)]) == (0, 0)
    assert hops_and_load((8,), [(r, r ^ 4) for r in range(8)]) == (2, 2)  # four hops, all up: four on a link
    assert hops_and_load((8,), [(0, 7)]) == (0, 0)  # around the end
    assert hops_and_load((4, 4), [(0, 5)]) == (1, 0)  # one hop in each dimension
    assert hops_and_load((4, 4), [(0, 2), (1, 3)]) == (1, 1)  # they share the link from 1 to 2


def test_derivatives_are_those_of_the_times():
    rows = [
        row(scheme, size) for scheme in ("recursive_doubling", "ring", NEAR) for size in (256, 4096, 1 << 20)
    ]
    run = RUN._replace(shape=(4, 4), groups=("a",) * 8 + ("b",) * 8)
    rows += [row("recursive_doubling", 4096, run)]
    prices = Prices(rows)
    sheet, at = prices.sheet(rows), prices.mean + 0.1
    _, slopes = sheet.log_times(at)
    for index in range(len(at)):
        nudge = np.zeros_like(at)
        nudge[index] = 1e-6
        differs = (sheet.log_times(at + nudge)[0] - sheet.log_times(at - nudge)[0]) / 2e-6
        assert np.allclose(differs, slopes[:, index], atol=1e-6)


def made(run, latency, byte):
    """Times of a machine that follows the model with other prices than thought."""
    shapes = [(scheme, 4**power) for scheme in ("recursive_doubling", "ring", NEAR) for power in range(4, 11)]
    rows = [row(scheme, size, run) for scheme, size in shapes]
    prices = Prices(rows)
    truth = prices.mean.copy()
    for (name, _), index in prices._at.items():
        truth[index] += {"latency": math.log(latency), "bytes": math.log(byte), "round": 0.3}.get(name, 0)
    times = np.exp(prices.sheet(rows).log_times(truth)[0])
    return [one._replace(microseconds=float(time)) for one, time in zip(rows, times, strict=True)]


def test_a_machine_that_follows_the_model_is_predicted():
    known = [
        one
        for day, ranks in ((1, 8), (2, 64), (3, 256))
        for one in made(RUN._replace(name=f"2030_0{day}_01___00", ranks=ranks), 1 + 0.4 * day, 1.2)
    ]
    held = made(RUN._replace(name="2031_05_05___00", ranks=32), 2.6, 1.0)
    found = list(held_out(known, held))
    assert len(found) == len(held) - 3
    assert score([one.error for one in found]).p90 < 0.1
    assert ratio_error(found) < 0.05
    assert winners(found)[0] == winners(found)[1] > 0


@pytest.mark.parametrize("scheme", ["recursive_doubling", NEAR, "ring", "bine"])
@pytest.mark.parametrize("size", [256, 4096, 1 << 20])
def test_the_prices_are_those_of_the_simulator(tmp_path, scheme, size):
    """Of ranks that all do alike the sum over rounds is what simulating the fitted cluster gives."""
    known = made(RUN, 1.4, 1.2)
    fit = Fit(known, known)
    (log_time,), _ = fit.prices.sheet([row(scheme, size)]).log_times(fit.parameters)
    (tmp_path / "mars.toml").write_text(as_toml(fit.cluster(RUN)))
    cluster = description.load(tmp_path / "mars.toml")
    payload = Payload(size // ELEMENT, ELEMENT)
    found = simulate(build(scheme, RUN.ranks), cluster, block(cluster, RUN.ranks), payload)
    assert found.time == pytest.approx(math.exp(log_time), rel=1e-4)


def test_messages_that_leave_a_group_cost_more_in_the_cluster():
    run = RUN._replace(groups=("a",) * 8 + ("b",) * 8)
    known = made(run, 1.0, 1.0)
    cluster = Fit(known, known).cluster(run)
    assert [(tier.name, tier.joins) for tier in cluster.tiers] == [("node", 1), ("group", 8), ("network", 2)]
    assert cluster.tiers[2].latency > cluster.tiers[1].latency


def test_what_is_given():
    rows = [row("recursive_doubling", size) for size in (256, 2048, 65536, 131072, 1 << 20)]
    rows += [row("ring", size) for size in (1024, 4096, 65536)]
    over = [one._replace(algorithm=one.algorithm.replace("_ompi", "_over")) for one in rows]
    told = given([*over, *rows])
    assert [(one.algorithm, one.bytes) for one in told] == [
        ("recursive_doubling_ompi", 256), ("recursive_doubling_ompi", 131072), ("ring_ompi", 1024),
    ]  # fmt: skip
    assert [one.algorithm for one in given(over)] == ["recursive_doubling_over"] * 2 + ["ring_over"]
    assert given([row(NEAR, 4096)]) == []


def test_times_of_a_held_run_that_are_not_given_are_not_seen(shipped):
    name = "2025_04_07___16_33_47"
    held = [one for one in shipped if one.run.name == name]
    told = given(held)
    spoilt = [one if one in told else one._replace(microseconds=1e4 * one.microseconds) for one in held]
    known = [one for one in shipped if one.run.system == "lumi"]
    honest = [(one.microseconds, one.two_parameters) for one in held_out(known, held)]
    others = [one if one.run.name != name else one._replace(microseconds=7.0) for one in known]
    assert [(one.microseconds, one.two_parameters) for one in held_out(others, spoilt)] == honest
    assert len(honest) == sum(one.predicted for one in held) - 3


def test_a_fit_prefers_its_own_day_and_size(shipped):
    one = next(r for r in shipped if r.run.name == "2025_03_28___17_42_08").run
    other = next(r for r in shipped if r.run.name == "2025_03_28___18_19_43").run
    far = next(r for r in shipped if r.run.name == "2025_05_10___18_33_42").run
    assert 1 == resemblance(one, one) > resemblance(one, other) > resemblance(one, far) > 0
    assert resemblance(one, one._replace(system="elsewhere")) == 0


def test_scores():
    assert score([0.1, 0.2, 0.3]) == (0.2, pytest.approx(0.28), pytest.approx(2 / 3), 3)
    fast, slow = row("ring", 1024, time=10.0), row("recursive_doubling", 1024, time=20.0)
    rows = [Predicted(fast, 12.0, 20.0), Predicted(slow, 18.0, 10.0)]
    assert ratio_error(rows) == pytest.approx(1 / 3)
    assert ratio_error(rows, two=True) == pytest.approx(3)
    assert winners(rows) == (1, 1)
    assert winners([Predicted(fast, 19.0, 1.0), Predicted(slow, 18.0, 1.0)]) == (0, 1)


def test_two_parameters():
    rows = [row("recursive_doubling", size, time=4 * 2.0 + 4 * size * 1e-3) for size in (256, 4096, 65536)]
    found = two_parameters([], rows[:2], rows)
    assert np.allclose(found, [one.microseconds for one in rows])
    assert np.allclose(two_parameters(rows, [], rows), found)


def test_the_prices_are_fitted(shipped):
    known = [one for one in shipped if one.run.system == "lumi" and one.predicted]
    fit = Fit(known, known)
    errors = np.abs(fit.predict(known) / [one.microseconds for one in known] - 1)
    assert np.median(errors) < 0.03


@pytest.mark.deep
def test_committed_scores_are_those_of_this_code(shipped):
    """After a change: the commands of docs/results/README.md, then python docs/fill_tables.py."""
    for name, blind in (("published.json", False), ("published_blind.json", True)):
        committed = json.loads((ROOT / "docs/results" / name).read_text())
        found = list(held_out(shipped, shipped, blind))
        wanted = [row["predicted_us"] for row in committed["rows"]]
        assert np.allclose([one.microseconds for one in found], wanted, rtol=1e-3)
        assert math.isclose(
            committed["median_error"], score([one.error for one in found]).median, rel_tol=1e-2
        )


@pytest.mark.slow
def test_the_simple_model_is_beaten_on_every_system():
    rows = json.loads((ROOT / "docs/results/published.json").read_text())["rows"]
    for system in {row["system"] for row in rows}:
        mine, simple = (
            score([abs(row[of] / row["measured_us"] - 1) for row in rows if row["system"] == system])
            for of in ("predicted_us", "two_parameters_us")
        )
        assert mine.median < simple.median
        assert mine.p90 < simple.p90
