"""Ranks of torch.distributed as torchrun starts them, for tests and without MPI."""

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command.launch import ROOT, run

#: Marks tests of such ranks.
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed: pip install treeattn[torch]"
)

#: So that many ranks share few cores, on the loopback device.
SETTINGS = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def torchrun(
    program: Path, *words: object, ranks: int, timeout: float = 300, code: int = 0, **environment: str
):
    """`program` on so many ranks of this machine, with gloo over its loopback device. Returns the completed
    process, text captured."""
    environment = SETTINGS | environment
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    launcher = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks
    return run(*launcher, program, *words, timeout=timeout, code=code, **({"PYTHONPATH": path} | environment))


def ranks_by_environment(program: str, *, ranks: int, timeout: float = 300, **environment: str):
    """`program`, a text, as so many processes that find one another by their environment. When the first has
    ended, the others are killed. Returns the completed processes, with their `pid`, text captured."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    given = SETTINGS | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, **given, **environment, "RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        started[0].wait(timeout)
    finally:
        for process in started[1:]:
            process.kill()
        for process in started:
            process.stderr = process.communicate()[1]
    return started


def without_mpi() -> None:
    """Fail in a process that has come to load mpi4py."""
    assert "mpi4py" not in sys.modules
