"""The ``treeattn`` command on a machine whose ranks have emulated GPUs: python emulated.py WORDS..

EMULATED_GPUS: how many the machine has; EMULATED_NCCL: the minor version of an NCCL 2 that is there;
EMULATED_CUDA_MPI: the MPI library says that it takes the memory of GPUs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.emulator import device_array  # noqa: E402
from tests.emulator.runtime import StrictRuntime  # noqa: E402
from treeattn import mpi_library  # noqa: E402
from treeattn.backends.cuda import cupy_runtime  # noqa: E402
from treeattn.cli import main  # noqa: E402
from treeattn.collectives.runtime import nccl  # noqa: E402

GPUS = int(os.environ.get("EMULATED_GPUS", "8"))
runtime = StrictRuntime()


def choose(index: int) -> None:
    runtime.identity = f"8f1c0a52-{index % GPUS}"


cupy_runtime.current = lambda: runtime  # type: ignore[assignment,return-value]
cupy_runtime.choose = choose
if version := os.environ.get("EMULATED_NCCL"):
    from tests.support.nccl import NcclOverMpi

    nccl.problem = lambda: None
    nccl.version = lambda: (2, int(version))
    nccl.connect = NcclOverMpi
if os.environ.get("EMULATED_CUDA_MPI"):
    mpi_library.cuda_aware = lambda: True
    device_array.let_mpi_take_them()
main(sys.argv[1:])
