"""Commands over two nodes, as which MPICH takes one machine: ranks lie on them in turn."""

import functools
import math

import pytest

from treeattn.collectives.clusters import description
from treeattn.mpi import library
from treeattn.study.compare.rows import SUM, read

from .launch import CACHE, in_process, treeattn

pytestmark = [
    pytest.mark.skipif("MPICH" not in (library.version() or ""), reason="only MPICH makes up nodes"),
]
over_two_nodes = functools.partial(treeattn, ranks=4, MPIR_CVAR_NUM_CLIQUES="2")


def test_decode_takes_nodes_from_the_machine(tmp_path):
    words = ("--scheme", "hierarchical,split_rail", "--check", "--json", tmp_path / "facts.json")
    done = over_two_nodes("decode", CACHE, *words)
    assert "4 ranks on 2 nodes" in done.stdout
    nodes = [rank["node"] for rank in done.facts["ranks"]]
    assert sorted(map(nodes.count, {*nodes})) == [2, 2]
    unnamed = over_two_nodes("decode", CACHE, "--json", tmp_path / "facts.json")
    assert unnamed.facts["schemes"] == ["hierarchical"]


def test_doctor_says_where_ranks_are():
    done = over_two_nodes("doctor", ranks=3)
    assert "ranks on each node: " in done.said


def test_compare_by_size(tmp_path):
    out = tmp_path / "r.jsonl"
    words = ("--bytes", "64:1Ki:x16", "--repetitions", 2, "--out", out)
    over_two_nodes("compare", "--schemes", "hierarchical,mpi_allreduce", *words)
    rows = read(out)
    assert {(row.what, row.heads, row.head_dim) for row in rows} == {("reduce", 1, 14), ("reduce", 2, 126)}
    assert all(sorted(row.nodes) == [0, 0, 1, 1] for row in rows)
    for row in rows:
        assert 0 < row.least_us <= row.mean_us <= row.slowest_us
        if row.scheme == "hierarchical":
            assert row.messages_intra > 0
            assert row.messages_inter > 0
        if row.scheme == SUM:
            assert (row.messages_inter, row.bytes_library) == (None, None) or row.bytes_library > 0


def test_calibrate_and_those_who_read_its_file(tmp_path):
    here, lines = tmp_path / "here.toml", tmp_path / "lines.jsonl"
    done = over_two_nodes("calibrate", "--out", here, "--seconds", 1, "--json", tmp_path / "facts.json")
    assert "errors of the fit" in done.stdout
    assert "of kinds of probes left out of it: median" in done.said
    cluster = description.load(here)
    assert [tier.name for tier in cluster.tiers] == ["node", "network"]
    assert (cluster.name, cluster.places, cluster.slots) == ("here", 4, 2)
    assert cluster.memory > 0
    found = done.facts
    assert found["drift"] > 0
    assert cluster.drift == pytest.approx(abs(math.log(found["drift"])), abs=1e-3)
    assert cluster.scatter > 0
    assert found["prices"]["network.latency"]["error"] > 0
    assert found["prices"]["network.latency"]["value"] == pytest.approx(cluster.tiers[1].latency, rel=1e-5)
    comments = here.read_text().partition("name =")[0]
    for words in ("UTC", "treeattn 0", "4 ranks on", "load ", found["mpi"].split()[0], "the last block took"):
        assert words in comments
    residuals = found["residuals"]
    assert {row["kind"] for row in residuals} == {"call", "ping-pong", "exchange"}
    assert all(row["measured_us"] > 0 and row["fitted_us"] > 0 for row in residuals)
    assert "# Errors of the fit: median" in here.read_text()

    done = in_process("simulate", "--cluster", here, "--ranks", 4, "--schemes", "ring,hierarchical")
    assert "calibrated with" in done.stdout

    words = ("--seq-len", 4096, "--bytes", 2080, "--heads", 4, "--repetitions", 1)
    schemes = ("--schemes", "hierarchical,mpi_allreduce", "--out", lines)
    said = in_process("compare", *schemes, *words, TREEATTN_CLUSTER=str(here)).said
    assert "predicted: on here (TREEATTN_CLUSTER): 2 x 2 ranks, calibrated with" in said
    assert "predicted against measured, 2 times: median" in said
    assert "95 % intervals hold errors of prices" in said
    known = {(row.what, row.scheme): row for row in read(lines) if row.predicted_us is not None}
    assert known.keys() == {("decode", "hierarchical"), ("reduce", "hierarchical")}
    assert known["decode", "hierarchical"].predicted_us > known["reduce", "hierarchical"].predicted_us > 0
    for row in known.values():
        assert row.predicted_low_us < row.predicted_us < row.predicted_high_us


@pytest.mark.deep
def test_one_node_has_one_tier(tmp_path):
    treeattn("calibrate", "--out", tmp_path / "n.toml", "--seconds", 1, "--executor", "mpi", ranks=3)
    cluster = description.load(tmp_path / "n.toml")
    assert [tier.name for tier in cluster.tiers] == ["node"]
    assert list(cluster.executors) == ["mpi"]
