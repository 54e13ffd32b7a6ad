"""Ranks of torch.distributed as torchrun starts them, for tests and without MPI."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from tests.command.launch import ROOT, run

#: Marks tests of such ranks.
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed: pip install treeattn[torch]"
)


def torchrun(program: Path, *words: object, ranks: int, timeout: float = 120, **environment: str):
    """`program` on so many ranks of this machine, with gloo over its loopback device. Returns the completed
    process, text captured."""
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    launcher = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks
    return run(*launcher, program, *words, timeout=timeout, PYTHONPATH=path, **environment)


def without_mpi() -> None:
    """Fail in a process that has come to load mpi4py."""
    assert "mpi4py" not in sys.modules
