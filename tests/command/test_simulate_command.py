"""`treeattn simulate` as people use it."""

from xml.etree import ElementTree

import pytest

from treeattn.cli import simulate as simulating
from treeattn.study.intervals import DRAWS

from .launch import in_process, treeattn


def test_the_papers_latency_setting_in_one_command(tmp_path):
    path = tmp_path / "s.json"
    done = treeattn("simulate", "--cluster", "dgx-h100", "--ranks", 128, "--tokens", "5120k", "--json", path)
    said = "simulated: 128 ranks on dgx-h100", "run by nccl", "split_rail", "floor, what no scheme", "kv_ring"
    for word in (*said, "latency (nvlink"):
        assert word in done.stdout
    assert {row["scheme"] for row in done.facts["rows"]} >= {"hierarchical", "recursive_doubling"}
    for row in done.facts["rows"]:
        assert row["floor_microseconds"] <= row["microseconds"]
        assert row["decode_step"]["kv_ring"] > 100 * row["decode_step"]["time"]
        total = sum(segment["microseconds"] for segment in row["segments"])
        assert total == pytest.approx(row["microseconds"])


def test_one_schedule_under_several_placements_and_all_schemes():
    words = ["--cluster", "cpu-hdr200", "--ranks"]
    done = in_process("simulate", *words, 16, "--schemes", "ring", "--placement", "block,cyclic,suited")
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("ring ")][-1] == "cyclic"
    done = in_process("simulate", *words, 4, "--schemes", "all")
    assert "all_gather_merge" in done.stdout
    assert "chain" in done.stdout


def test_schemes_of_the_same_messages_stand_in_one_row(tmp_path):
    words = ("--cluster", "laptop", "--ranks", 4, "--schemes", "binary_tree,k_ary_tree,k_nomial_tree")
    done = in_process("simulate", *words, "--json", tmp_path / "s.json")
    rows = [line for line in done.stdout.splitlines() if line.startswith(("binary_tree ", "k_ary_tree "))]
    assert [row.split()[:3] for row in rows] == [["binary_tree", "=", "k_ary_tree"]]
    assert len(done.facts["rows"]) == 3


def test_drawings():
    words = ["simulate", "--cluster", "dgx-h100", "--ranks", 16, "--schemes", "hierarchical"]
    svg = in_process(*words, "--format", "svg")
    ElementTree.fromstring(svg.stdout)
    assert svg.stdout.count('class="bar take"') == 14 * 2 + 2
    assert ElementTree.fromstring(in_process(*words, "--format", "rounds").stdout) is not None


def test_the_variable_names_the_cluster_and_the_report_says_so(tmp_path):
    path = tmp_path / "s.json"
    for given, named, by in (
        ((), "lumi", "TREEATTN_CLUSTER"),
        (("--cluster", "leonardo"), "leonardo", "--cluster"),
    ):
        done = in_process("simulate", *given, "--ranks", 4, "--json", path, TREEATTN_CLUSTER="lumi")
        assert (done.facts["cluster"], done.facts["named_by"]) == (named, by)
        assert f"4 ranks on {named}{' (TREEATTN_CLUSTER)' * (not given)}: " in done.stdout


def test_ranks_that_arrive_late(tmp_path):
    """Instants given by hand are simulated as they are; what is drawn widens the interval. Table, JSON and
    drawing are of one step."""
    path, drawing, found = tmp_path / "s.json", tmp_path / "s.svg", []
    words = ("simulate", "--cluster", "leonardo", "--ranks", 4, "--schemes", "ring,chain", "--json", path)
    for more in ((), ("--arrivals", "0+0+0+1ms"), ("--arrivals", "exponential:20us")):
        done = in_process(*words, *more)
        found.append({row["scheme"]: row["estimate"] for row in done.facts["rows"]})
        assert ("with arrivals" in done.stdout) == bool(more)
        drawn = in_process(*words, *more, "--schemes", "ring", "--format", "svg", "--out", drawing)
        (ring,) = drawn.facts["rows"]
        time = ring["microseconds"]
        assert found[-1]["ring"]["time"] == ring["estimate"]["time"] == pytest.approx(time)
        assert sum(part["microseconds"] for part in ring["segments"]) == pytest.approx(time)
        assert f"simulated: {time:.1f} µs" in drawing.read_text()
    plain, late, noisy = (one["ring"] for one in found)
    assert 1000 < late["time"] <= 1000 + plain["time"]
    assert noisy["time"] > plain["time"]
    assert noisy["high"] / noisy["low"] > plain["high"] / plain["low"]


@pytest.mark.parametrize(("arrivals", "each"), [("together", 1), ("late:20us", DRAWS + 1)])
def test_an_interval_takes_no_simulation_of_its_own(monkeypatch, arrivals, each):
    """So ten schemes on 2,048 ranks take seconds: only arrivals that differ are simulated several times."""
    simulate, of = simulating.simulate, []
    monkeypatch.setattr(
        simulating, "simulate", lambda schedule, *more: of.append(schedule.name) or simulate(schedule, *more)
    )
    words = ("--cluster", "frontier", "--ranks", 64, "--schemes", "bine,ring", "--arrivals", arrivals)
    in_process("simulate", *words)
    assert of == ["bine"] * each + ["ring"] * each
