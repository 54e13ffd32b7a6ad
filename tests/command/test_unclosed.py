"""Decoders that nobody closes use up what the MPI library has; the error says what to do."""

import pytest

from .launch import mpiexec, run

pytestmark = pytest.mark.skipif(mpiexec() is None, reason="no mpiexec")

PROGRAM = """
import treeattn
from mpi4py import MPI
taken, kept = [MPI.COMM_WORLD.Dup() for _ in range(1900)], []  # of MPICH's 2048
shape = dict(heads=1, kv_heads=1, head_dim=8, dtype="float32", scheme="{scheme}")
try:
    for _ in range(1 << 17):
        kept.append(treeattn.Decoder(**shape))
except treeattn.BackendError as error:
    if not kept[0].plan.comm.rank:
        print(len(kept), error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [pytest.param("chain", marks=pytest.mark.deep), "hierarchical"])
def test_the_last_communicator_names_the_remedy(scheme):
    """Also where it is missed in looking for nodes."""
    done = run("-m", "mpi4py", "-c", PROGRAM.replace("{scheme}", scheme), ranks=2)
    count, message = done.stdout.split(maxsplit=1)
    assert int(count) > 10
    assert "until close()" in message
    assert message.count("\n") == 1
