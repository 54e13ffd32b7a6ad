"""Which device a rank of a command computes on."""

from __future__ import annotations

from typing import Any

from treeattn.backends import device as devices
from treeattn.backends.device import Device
from treeattn.collectives.runtime.communicator import Communicator
from treeattn.errors import ArgumentError
from treeattn.mpi import communicators
from treeattn.mpi.communicators import collectively


def own_device(world: Communicator, name: str) -> tuple[Device, str | None]:
    """The device of this rank, and what to say where ranks share one. Ranks of a node take its GPUs in turn.

    Collective. Raises `ArgumentError`, the same on every rank, where a rank has no such device.
    """
    local = communicators.node_local_rank(world)

    def place() -> Any:
        if name == "cuda":
            from treeattn.backends.cuda import cupy_runtime  # loaded where GPUs are asked for

            problem = cupy_runtime.problem()
            if problem is not None:
                raise ArgumentError(problem)
            cupy_runtime.choose(local)
        return devices.find(name)

    device = collectively(world, place)
    if device.name == "cpu":
        return device, None
    from treeattn.decoder import gpu_reducers

    shared = gpu_reducers.shared_gpu(world, device.runtime)
    return device, f"{shared}: times include waiting for each other" if shared else None
