"""Communicators of this package: the default, those of callers, and what ranks of one share."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from treeattn.collectives.runtime.communicator import Communicator, Member, MpiCommunicator, kernel
from treeattn.errors import ANOTHER_PROCESS, ArgumentError, BackendError, StateError
from treeattn.mpi import forked, launch, library

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

    from treeattn.collectives.runtime.torch_communicator import TorchCommunicator


def world() -> MpiCommunicator:
    """COMM_WORLD, after making sure that the job did not come up as so many singletons.

    Collective for the first time, as `intracomm`.
    """
    alone = launch.launched().launcher == launch.TORCHRUN and not library.started()
    if problem := launch.problem(1 if alone else library.load().COMM_WORLD.size):
        raise BackendError(": ".join(problem))
    return _watched(library.load().COMM_WORLD)


def alone() -> MpiCommunicator:
    """This process by itself: COMM_SELF, watched."""
    return _watched(library.load().COMM_SELF)


def intracomm(comm: object) -> Communicator:
    """`comm` if it is a communicator of mpi4py or a process group of torch, watched; for None torch's default
    group where there is one, else COMM_WORLD. Collective for the first time.

    Raises `ArgumentError` for anything else, and `StateError` in a process that was forked from one of a job.
    """
    distributed = sys.modules.get("torch.distributed")  # without it there is no process group
    if distributed is not None and distributed.is_available():
        if comm is None and distributed.is_initialized():
            comm = distributed.group.WORLD
        if isinstance(comm, distributed.ProcessGroup):
            _check_fork("torch")
            return _of_torch().of(comm)
        if isinstance(comm, _of_torch()):
            _check_fork("torch")
            return comm
    if comm is None:
        return world()
    mpi: Any = sys.modules.get("mpi4py.MPI")
    null = mpi is not None and isinstance(comm, mpi.Comm) and comm == mpi.COMM_NULL
    if null or (distributed and isinstance(comm, int) and comm == distributed.GroupMember.NON_GROUP_MEMBER):
        raise ArgumentError("this rank is no member of the group that comm is: its members alone call")
    if type(comm).__name__ == "DeviceMesh":
        raise ArgumentError("comm is a DeviceMesh: pass the group of a dimension, such as mesh.get_group(0)")
    if mpi is None or not isinstance(comm, mpi.Intracomm):
        raise ArgumentError(
            "comm must be an intracommunicator of mpi4py, such as MPI.COMM_WORLD, or a process group of "
            f"torch.distributed, not {comm!r}"
        )
    return _watched(comm)


def mpi_intracomm(comm: object, what: str) -> MpiCommunicator:
    """As `intracomm`, for what goes by MPI alone. Raises `ArgumentError`, which names it, for torch's."""
    found: Any = intracomm(comm)
    if found.library != "mpi":
        raise ArgumentError(f"{what} takes a communicator of mpi4py: start the job with mpiexec")
    mpi: MpiCommunicator = found
    return mpi


def _check_fork(library: str) -> None:
    """Raise `StateError` where this process would communicate by the "mpi" or "torch" of its parent."""
    distributed: Any = sys.modules.get("torch.distributed")
    torch = distributed is not None and forked.group() is distributed.group.WORLD
    if forked.mpi if library == "mpi" else torch:
        raise StateError(f"what this process communicates by is {ANOTHER_PROCESS}")


def _of_torch() -> type[TorchCommunicator]:
    from treeattn.collectives.runtime.torch_communicator import TorchCommunicator

    return TorchCommunicator


def _watched(comm: Intracomm) -> MpiCommunicator:
    _check_fork("mpi")
    from treeattn.collectives.runtime.mpi_communicator import MpiCommunicator

    return MpiCommunicator.of(comm)


def oversubscribed(comm: object) -> bool:
    """Whether the machine of this rank has more ranks than cores for them.

    Nodes may be of one machine (containers, emulated nodes) and then share its cores; and the launcher may
    have started ranks of other communicators there.
    """
    return _oversubscribed(intracomm(comm).members)


@functools.lru_cache(maxsize=64)
def _oversubscribed(members: tuple[Member, ...]) -> bool:
    here = [member.cores for member in members if member.kernel == kernel()]
    cores = functools.reduce(int.__or__, here).bit_count()
    return max(len(here), launch.local_size()) > cores


def node_groups(comm: object) -> tuple[tuple[int, ...], ...]:
    """Ranks of `comm` by node (shared memory domain), nodes in order of their lowest rank. Collective for the
    first time, as `intracomm`."""
    return intracomm(comm).nodes


def node_local_rank(comm: Communicator) -> int:
    """Which of the ranks on this node (shared memory domain) this one is, from 0. Collective for the first
    time, as `intracomm`."""
    return next(node.index(comm.rank) for node in node_groups(comm) if comm.rank in node)
