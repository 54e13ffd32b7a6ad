"""torchrun on every emulated node: slots within them, torch's messages between them, and no MPI."""

import json
import sys

from tests.support.torchrun import needs_torch

from .conftest import PROGRAMS

pytestmark = needs_torch


def test_ranks_of_torchrun_find_their_nodes_and_decode(cluster):
    job = PROGRAMS / "torchrun_everywhere.sh", sys.executable, PROGRAMS / "over_torch.py"
    done = cluster.run("--nodes", 2, "--ranks-per-node", 2, "--", "bash", *job)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["nodes"] == [[0, 1], [2, 3]]
    assert found["executors"] == ["slots", "torch"]
    assert len(set(found["bits"])) == 1
    assert not found["mpi"]
