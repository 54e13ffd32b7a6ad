"""`treeattn paper` as people use it."""

import json

from treeattn.study.paper import EXPERIMENTS

from .launch import in_process


def test_the_paper_beside_its_model(tmp_path):
    path = tmp_path / "p.json"
    done = in_process("paper", "--wide", "--json", path)
    words = ("close to 8", "3,845", "1,040", "dgx-h100, simulated")
    for word in (*words, "what is not explained: docs/paper.md"):
        assert word in done.stdout
    assert [entry["name"] for entry in json.loads(path.read_text())["experiments"]] == list(EXPERIMENTS)


def test_one_experiment():
    done = in_process("paper", "volume")
    assert "volume:" in done.stdout
    assert "latency:" not in done.stdout
