"""Communicators of this package: the default, those of callers, and what ranks of one share."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from treeattn import launch, mpi_library
from treeattn.collectives.runtime.process import kernel
from treeattn.errors import ArgumentError, BackendError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

    from treeattn.collectives.runtime.mpi_communicator import MpiCommunicator

__all__ = ["alone", "intracomm", "node_groups", "node_local_rank", "oversubscribed", "world"]


def world() -> MpiCommunicator:
    """COMM_WORLD, after making sure that the job did not come up as so many singletons.

    Collective for the first time, as `intracomm`.
    """
    comm = mpi_library.load().COMM_WORLD
    if comm.size == 1 and (problem := launch.problem()):
        raise BackendError(": ".join(problem))
    return _watched(comm)


def alone() -> MpiCommunicator:
    """COMM_SELF."""
    return _watched(mpi_library.load().COMM_SELF)


def intracomm(comm: object) -> MpiCommunicator:
    """`comm` if it is a communicator, watched; COMM_WORLD for None. Collective for the first time.

    Raises `ArgumentError` for anything else.
    """
    if comm is None:
        return world()
    library = mpi_library.load()
    if not isinstance(comm, library.Intracomm) or comm == library.COMM_NULL:
        raise ArgumentError(
            f"comm must be an intracommunicator of mpi4py, such as MPI.COMM_WORLD, not {comm!r}"
        )
    return _watched(comm)


def _watched(comm: Intracomm) -> MpiCommunicator:
    from treeattn.collectives.runtime.mpi_communicator import MpiCommunicator

    return MpiCommunicator.of(comm)


def oversubscribed(comm: Intracomm) -> bool:
    """Whether the machine of this rank has more ranks than cores for them.

    Nodes may be of one machine (containers, emulated nodes) and then share its cores; and the launcher may
    have started ranks of other communicators there.
    """
    here = [member.cores for member in _watched(comm).members if member.kernel == kernel()]
    cores = functools.reduce(int.__or__, here).bit_count()
    return max(len(here), launch.local_size()) > cores


def node_groups(comm: Intracomm) -> tuple[tuple[int, ...], ...]:
    """Ranks of `comm` by node (shared memory domain), nodes in order of their lowest rank. Collective for the
    first time, as `intracomm`."""
    return _watched(comm).nodes


def node_local_rank(comm: Intracomm) -> int:
    """Which of the ranks on this node (shared memory domain) this one is, from 0. Collective for the first
    time, as `intracomm`."""
    return next(node.index(comm.rank) for node in node_groups(comm) if comm.rank in node)
