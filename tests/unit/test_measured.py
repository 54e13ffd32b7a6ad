"""What docs/measured.md says of its tables is what their intervals carry.

No time is taken here: these are the results in docs/results. New ones may want another page.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pytest

from tests.command.launch import in_process
from treeattn.collectives import names
from treeattn.study.compare.answer import Answer, answers
from treeattn.study.compare.results import compared_series, read, summarise
from treeattn.study.compare.schema import NULL, SUM

pytestmark = pytest.mark.slow

RESULTS = Path(__file__).resolve().parents[2] / "docs/results"
FLAT_TREES = {"binary_tree", "k_ary_tree", "k_nomial_tree", "double_binary_tree", "chain"}
RINGS = {"query_ring", "kv_ring"}
# With two ranks: one sends, the other merges and sends back.
ROOTED = {"hierarchical", "logp_optimal", "k_nomial_tree", "chain", "binary_tree", "k_ary_tree"}


class Interval(NamedTuple):
    low: float
    high: float

    def ahead(self, other: Interval) -> bool:
        return self.high < other.low


def intervals(fill_tables, file, what="reduce", tokens=0) -> dict[str, Interval]:
    """Of the medians; where there is none, of too few blocks, the median itself twice."""
    rows = fill_tables.summaries(file, what, tokens)
    series = compared_series(rows.values())
    times = {name: row.times[series] for name, row in rows.items()}
    return {name: Interval(t.low or t.median, t.high or t.median) for name, t in times.items()}


def told(file, what, tokens, launch=None) -> list[Answer]:
    """The table of answers, of all launches or of one."""
    results = read(RESULTS / file)
    rows = [row for row in summarise(results) if (row.key.what, row.key.tokens) == (what, tokens)]
    keys = {row.key for row in rows}
    points = [point for point in results.points if point.key in keys and launch in (None, point.launch)]
    return answers(points, compared_series(rows))


def ahead(of, name) -> set[str]:
    return {other for other in of if of[other].ahead(of[name])}


def behind(of, name) -> set[str]:
    return {other for other in of if of[name].ahead(of[other])}


@pytest.fixture(params=["block", "cyclic"])
def placement(request, fill_tables):
    return request.param, intervals(fill_tables, f"cluster_{request.param}.jsonl.xz")


def in_a_row(fill_tables, placement) -> dict[str, int]:
    file = f"cluster_{placement}.jsonl.xz"
    rows, nodes = fill_tables.summaries(file, "reduce", 0), fill_tables.nodes_of(file)
    return {name: fill_tables.in_a_row(rows[name], nodes) for name in rows if name in names("schedule")}


def test_messages_in_a_row_decide(placement, fill_tables):
    where, of = placement
    steps = in_a_row(fill_tables, where)
    groups = [{name for name, many in steps.items() if many in group} for group in ({2}, {4}, {6, 7, 14})]
    assert all(groups)
    for fewer, more in ((0, 1), (1, 2)):
        assert all(groups[more] <= behind(of, name) for name in groups[fewer])
    assert steps["all_gather_merge"] == 1


@pytest.mark.parametrize(
    ("scheme", "block", "cyclic"),
    [("chain", 6, 14), ("k_nomial_tree", 4, 4), ("hierarchical", 2, 2), ("bine", 2, 3), ("ring", 7, 14)],
)
def test_messages_in_a_row_are_those_counted_by_hand(fill_tables, scheme, block, cyclic):
    assert in_a_row(fill_tables, "block")[scheme] == block
    assert in_a_row(fill_tables, "cyclic")[scheme] == cyclic


def test_hierarchical_on_the_cluster(placement, fill_tables):
    where, of = placement
    later = behind(of, "hierarchical")
    leaders = {"multi_leader", "split_rail", "uneven_nodes"}
    assert later >= FLAT_TREES | leaders | {"all_gather_merge", "mpi_allreduce", "logp_optimal"}
    sooner = ahead(of, "hierarchical") - {NULL}
    assert sooner == {"head_all_to_all"} | ({"recursive_multiplying"} if where == "block" else set())
    flat = {"recursive_doubling", "bine"}
    assert later.isdisjoint(flat) if where == "block" else later >= flat | {"recursive_multiplying"}
    step = intervals(fill_tables, f"cluster_{where}.jsonl.xz", "decode", 4096)
    assert behind(step, "hierarchical") >= FLAT_TREES


def test_other_schemes_on_the_cluster(placement):
    _, of = placement
    wide = {"elimination", "reduce_scatter_gather", "circulant", "all_gather_trees"}
    assert behind(of, "k_nomial_tree") >= wide
    assert "mpi_allreduce" in ahead(of, SUM)
    assert behind(of, SUM) >= {"two_allreduce", "three_allreduce"}


def test_what_placement_changes(fill_tables):
    block, cyclic = (intervals(fill_tables, f"cluster_{name}.jsonl.xz") for name in ("block", "cyclic"))
    sooner = {name for name in block if cyclic[name].ahead(block[name])}
    later = {name for name in block if block[name].ahead(cyclic[name])}
    assert sooner == {"circulant", "all_gather_trees", "head_scatter"}
    assert "hierarchical" not in later
    assert later >= {"chain", "ring"}


def test_one_machine(fill_tables, tmp_path):
    schedules = set(names("schedule"))
    of = intervals(fill_tables, "compare_4.jsonl.xz")
    collectives = {"mpi_allreduce", "two_allreduce", "three_allreduce"}
    assert ahead(of, SUM) == schedules | {NULL, "head_all_to_all"}
    assert behind(of, SUM) == collectives
    command = ["plot", RESULTS / "compare_2.jsonl.xz", "--figures", "relative", "--format", "svg"]
    command += ["--out", tmp_path, "--json", tmp_path / "numbers.json"]
    in_process(*command)
    figure = next(f for f in json.loads((tmp_path / "numbers.json").read_text()) if "reduce" in f["name"])
    points = figure["panels"][0]["series"][0]["points"]
    ratios = {name: Interval(*point[2:4]) for name, point in zip(figure["labels"], points, strict=True)}
    assert ahead(ratios, SUM) == schedules - ROOTED
    assert behind(ratios, SUM) == collectives
    for group in (ROOTED, schedules - ROOTED):
        assert not any(behind(ratios, name) & group for name in group)


def test_launches_on_two_ranks():
    """The first is unlike the others, for schedules that gather at rank 0 and for those that do not."""
    schedules = set(names("schedule"))
    for launch, (others, rooted) in {1: (0.4, 0.5), 2: (0.7, 1.2), 3: (0.7, 1.2)}.items():
        found = {
            answer.key.scheme: answer.ratio for answer in told("compare_2.jsonl.xz", "reduce", 0, launch)
        }
        assert median(found[name] for name in ROOTED) == pytest.approx(rooted, abs=0.05)
        assert median(found[name] for name in schedules - ROOTED) == pytest.approx(others, abs=0.05)


def test_whole_steps_on_one_machine(fill_tables):
    of_2, of_4 = (intervals(fill_tables, f"compare_{ranks}.jsonl.xz", "decode", 4096) for ranks in (2, 4))
    assert ahead(of_2, SUM) | ahead(of_4, SUM) <= {NULL}
    assert behind(of_2, SUM) == RINGS | {"three_allreduce"}
    assert behind(of_4, SUM) == RINGS | {"two_allreduce", "three_allreduce"}
    faster = [
        [
            answer.ratio
            for answer in told(f"compare_{ranks}.jsonl.xz", "decode", 4096)
            if answer.verdict == "faster"
        ]
        for ranks in (2, 4)
    ]
    assert not faster[0]
    assert len(faster[1]) == 10
    assert (round(min(faster[1]), 2), round(max(faster[1]), 2)) == (0.83, 0.94)
    for ranks in (2, 4):
        of = intervals(fill_tables, f"compare_{ranks}.jsonl.xz", "decode", 65536)
        others = set(of) - RINGS
        assert all(behind(of, name) == RINGS for name in others)
