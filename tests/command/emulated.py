"""A machine whose ranks have emulated GPUs.

EMULATED_GPUS: how many it has; EMULATED_NCCL: the minor version of an NCCL 2 that is there;
EMULATED_CUDA_MPI: the MPI library says that it takes the memory of GPUs.
"""

import contextlib
import os
from collections.abc import Iterator
from unittest import mock

from tests.emulator import device_array
from tests.emulator.runtime import StrictRuntime
from tests.support.nccl import NcclOverMpi
from treeattn.backends.cuda import cupy_runtime
from treeattn.collectives.runtime import nccl
from treeattn.mpi import library

runtime = StrictRuntime()


@contextlib.contextmanager
def gpus() -> Iterator[None]:
    """This process has them until the end, as its environment says."""
    count = int(os.environ.get("EMULATED_GPUS", "8"))

    def choose(index: int) -> None:
        runtime.identity = f"8f1c0a52-{index % count}"

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(cupy_runtime, current=lambda: runtime, choose=choose))
        if version := os.environ.get("EMULATED_NCCL"):
            there = {"problem": lambda: None, "version": lambda: (2, int(version)), "connect": NcclOverMpi}
            stack.enter_context(mock.patch.multiple(nccl, **there))
        if os.environ.get("EMULATED_CUDA_MPI"):
            stack.enter_context(mock.patch.object(library, "cuda_aware", return_value=True))
            device_array.let_mpi_take_them()
            stack.callback(delattr, device_array.DeviceArray, "__cuda_array_interface__")
        yield
