"""How records travel between ranks, and who folds them on the way.

From the host there is one way, MPI. From GPUs there are three, each taken only when it is named:

- ``"nccl"``: NCCL, from GPU to GPU: grouped sends and receives with merge kernels between, as one CUDA graph.
- ``"cuda-mpi"``: an MPI library that takes GPU buffers; the host starts every round.
- ``"host"``: any MPI library: down through page-locked memory, folded on the processor, and up again.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any, NamedTuple

from treeattn import comm as comm_
from treeattn import partial
from treeattn.backends import cpu
from treeattn.backends.cuda.runtime import Runtime
from treeattn.collectives.catalog import Scheme, parse
from treeattn.collectives.check import Certificate
from treeattn.collectives.schedule import Schedule
from treeattn.decoder.device import Cuda, Device
from treeattn.errors import RestrictionError, TransportError, TreeattnError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["Reduction", "choose", "reducer", "shared_gpu"]

_CHOICES = (
    "transport='nccl' (every rank has a GPU of its own), 'cuda-mpi' (the MPI library takes GPU buffers) or "
    "'host' (any MPI, through page-locked memory)"
)


class Reduction(NamedTuple):
    """What is to be reduced: `buffer` [..., head_dim + 2], cut between groups of `group` records."""

    scheme: str
    schedule: Schedule | None
    merge: Any
    buffer: Any
    group: int


def choose(device: str, transport: str | None, scheme: Scheme, size: int) -> str:
    """The transport of a scheme over `size` ranks: the one that is named if it serves, or the only one.

    Raises `TransportError`, which lists what would serve; `RestrictionError` where the scheme is not for
    the device.
    """
    if scheme.kind == "baseline" and device != "cpu":
        raise RestrictionError(f"{scheme.name} is a baseline for device='cpu'")
    if device not in scheme.devices:
        raise RestrictionError(f"{scheme.name} is for device='{scheme.devices[0]}': {scheme.elsewhere}")
    if device == "cpu":
        if transport not in (None, "mpi"):
            raise TransportError(f"transport {transport!r} does not serve device='cpu': use 'mpi' or None")
        return "mpi"
    if transport not in (None, "nccl", "cuda-mpi", "host"):
        raise TransportError(f"transport {transport!r} does not serve device='cuda': use {_CHOICES}")
    if scheme.kind == "library":
        return _of_library(scheme, transport)
    if transport is None and size > 1:
        raise TransportError(f"device='cuda' on {size} ranks needs a transport: {_CHOICES}")
    return transport or "mpi"  # one rank sends nothing


def _of_library(scheme: Scheme, transport: str | None) -> str:
    if scheme.name == "nccl_allreduce" and transport in (None, "nccl"):
        return "nccl"
    if scheme.name == "mpi_allreduce" and transport == "host":
        return "host"
    wanted = "nccl" if scheme.name == "nccl_allreduce" else "host"
    raise TransportError(f"{scheme.name} on device='cuda' is for transport={wanted!r}, not {transport!r}")


def reducer(comm: Intracomm, transport: str, device: Device, reduction: Reduction) -> Any:
    """A planned `treeattn.decoder.plan.Reduction` of the buffer. Collective; raises on every rank alike."""
    if transport == "mpi":
        return _over_mpi(comm, reduction)
    assert isinstance(device, Cuda)
    return _OF_GPUS[transport](comm, device.runtime, reduction)


def _over_nccl(comm: Intracomm, runtime: Runtime, reduction: Reduction) -> Any:
    from treeattn.collectives.executors.nccl import Reducer
    from treeattn.collectives.libraries import nccl
    from treeattn.collectives.libraries.nccl_allreduce import NcclAllreduce

    problem = nccl.problem()
    comm_.agree(comm, {}, None if problem is None else TransportError(problem))
    _check_one_gpu_each(comm, runtime)
    scheme, schedule, merge, buffer, group = reduction
    communicator = comm_.together(comm, lambda: nccl.connect(comm, runtime))

    def planned() -> Any:
        if schedule is not None:
            return Reducer(communicator, schedule, merge, buffer, runtime, group)
        return NcclAllreduce(communicator, merge, buffer, runtime, int(parse(scheme)[1].get("calls", "2")))

    try:
        return comm_.together(comm, planned)
    except TreeattnError:
        communicator.abort()
        raise


def shared_gpu(comm: Intracomm, runtime: Runtime) -> str | None:
    """Which ranks share which GPU, where some do; else None. Collective."""
    users: dict[tuple[str, str], list[int]] = {}
    for rank, gpu in enumerate(comm.allgather((socket.gethostname(), runtime.identity))):
        users.setdefault(gpu, []).append(rank)
    for (host, identity), ranks in users.items():
        if len(ranks) > 1:
            return f"ranks {', '.join(map(str, ranks))} share GPU {identity} of {host}"
    return None


def _check_one_gpu_each(comm: Intracomm, runtime: Runtime) -> None:
    """NCCL hangs or fails in its own words where two ranks share a GPU."""
    shared = shared_gpu(comm, runtime)
    if shared is not None:
        raise TransportError(
            f"{shared}, and NCCL needs one for each: start fewer ranks per node, make another device current "
            "on each of them (cupy.cuda.Device(n).use()), or take transport='host'"
        )


def _over_cuda_mpi(comm: Intracomm, runtime: Runtime, reduction: Reduction) -> Any:
    from treeattn.collectives.executors.mpi import Reducer

    problem = None
    if not comm_.cuda_aware():
        problem = TransportError(
            "this MPI library does not say that it takes GPU buffers (treeattn doctor names it): load a "
            "CUDA-aware one, or take transport='nccl' or 'host'"
        )
    comm_.agree(comm, {}, problem)
    _, schedule, merge, buffer, group = reduction
    assert schedule is not None
    return comm_.together(comm, lambda: Reducer(comm, schedule, merge, buffer, group, runtime))


def _over_mpi(comm: Intracomm, reduction: Reduction) -> Any:
    """Buffers that MPI can reach as they are."""
    if reduction.schedule is None:
        from treeattn.collectives.libraries.mpi_allreduce import MpiAllreduce

        comm_.together(comm, reduction.merge.mpi_function)
        return MpiAllreduce(comm, reduction.merge, reduction.buffer)
    from treeattn.collectives.executors.mpi import Reducer

    return Reducer(comm, reduction.schedule, reduction.merge, reduction.buffer, reduction.group)


class Staged:
    """A reduction on the processor, between two copies through page-locked memory."""

    def __init__(self, comm: Intracomm, runtime: Runtime, reduction: Reduction) -> None:
        """Collective."""
        self._runtime, self._buffer = runtime, reduction.buffer
        self._host = comm_.together(comm, lambda: runtime.pinned(self._buffer.shape, self._buffer.dtype))
        merge = cpu.MergeOperator(reduction.merge.width - partial.EXTRA, reduction.merge.dtype)
        self._reducer = _over_mpi(comm, reduction._replace(merge=merge, buffer=self._host))

    @property
    def certificate(self) -> Certificate:
        """What the check proved of the schedule."""
        certificate: Certificate = self._reducer.certificate
        return certificate

    def __call__(self) -> None:
        """One step: the host waits for the partials, the GPU is not waited for afterwards."""
        self._runtime.copy(self._host, self._buffer)
        self._runtime.synchronize()
        self._reducer()
        self._runtime.copy(self._buffer, self._host)

    def close(self) -> None:
        """Collective; after the last copy, whose memory then goes back."""
        self._runtime.synchronize()
        self._reducer.close()

    def __exit__(self, *exception: object) -> None:
        self._runtime.synchronize()
        self._reducer.__exit__(*exception)


_OF_GPUS = {"nccl": _over_nccl, "cuda-mpi": _over_cuda_mpi, "host": Staged}
