"""What docs/measured.md says of its tables is what their intervals carry.

No time is taken here: these are the results in docs/results. New ones may want another page.
"""

import json
import re

import pytest

from docs import fill_tables
from treeattn.collectives import names
from treeattn.study.compare.rows import SUM

pytestmark = pytest.mark.slow

FLAT_TREES = {"binary_tree", "k_ary_tree", "k_nomial_tree", "double_binary_tree", "chain"}


class Measured:
    """The reductions of a file, by the intervals of their ratios to the library's sum."""

    def __init__(self, rows):
        self.rows = rows
        self.ends = {name: (row["ratio_low"] or 1.0, row["ratio_high"] or 1.0) for name, row in rows.items()}

    def ahead(self, name) -> set[str]:
        return {other for other, (_, high) in self.ends.items() if high < self.ends[name][0]}

    def behind(self, name) -> set[str]:
        return {other for other, (low, _) in self.ends.items() if low > self.ends[name][1]}


@pytest.fixture(params=["block", "cyclic"])
def cluster(request):
    return request.param, Measured(fill_tables.summaries(f"cluster_{request.param}.jsonl"))


def test_messages_in_a_row_decide(cluster):
    _, of = cluster
    steps = {name: fill_tables.in_a_row(of.rows[name]) for name in of.rows if name in names("schedule")}
    groups = [{name for name, many in steps.items() if many in group} for group in ({2}, {4}, {6, 7, 14})]
    assert all(groups)
    for fewer, more in ((0, 1), (1, 2)):
        assert all(groups[more] <= of.behind(name) for name in groups[fewer])
    assert steps["all_gather_merge"] == 1


def test_hierarchical_on_the_cluster(cluster):
    where, of = cluster
    assert of.behind("hierarchical") >= FLAT_TREES | {"mpi_allreduce"}
    sooner = {"head_all_to_all"} | ({"recursive_multiplying"} if where == "block" else set())
    assert of.ahead("hierarchical") == sooner
    knowing_no_nodes = {"bine", "logp_optimal", "recursive_multiplying"}
    if where == "cyclic":
        assert of.behind("hierarchical") >= knowing_no_nodes
        assert "recursive_doubling" not in of.behind("hierarchical")


def test_other_schemes_on_the_cluster(cluster):
    _, of = cluster
    wide = {"elimination", "reduce_scatter_gather", "circulant", "all_gather_trees"}
    assert of.behind("k_nomial_tree") >= wide
    assert "mpi_allreduce" in of.ahead(SUM)
    assert of.behind(SUM) >= {"two_allreduce", "three_allreduce"}


def test_one_machine():
    of = Measured(fill_tables.summaries("compare_4.jsonl"))
    assert of.ahead(SUM) == set(names("schedule")) | {"head_all_to_all"}
    assert of.behind(SUM) == {"mpi_allreduce", "two_allreduce", "three_allreduce"}


def test_attention_on_each_processor():
    """Every row of that table: the processor, the build and the percents are those of its file."""
    page = (fill_tables.DOCS / "measured.md").read_text()
    shown = re.findall(r"^\| (\w+) .+\| (\w+) \| (\w+\.json) \| (.+) \| (.+) \|$", page, re.MULTILINE)
    assert len(shown) == 3
    for maker, isa, file, *percents in shown:
        found = json.loads((fill_tables.RESULTS / file).read_text())
        builds = [one["roofline"] for one in found["results"]] if "results" in found else [found]
        rows = next(one for one in builds if one["isa"] == isa)["rows"]
        assert maker in found.get("machine", found)["cpu"]
        for group, shares in zip((1, 4), percents, strict=True):
            of = {row["dtype"]: row["percent_of_bound"] for row in rows if row["group"] == group}
            assert shares == "/".join(f"{of[name]:.0f}" for name in ("float32", "bfloat16", "float16"))
