"""The communicator protocol: what this package asks of MPI's communicators and of torch's process groups.

What their implementations share stands here too: where ranks run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

from treeattn.collectives.runtime import watchdog
from treeattn.collectives.runtime.process import Process, kernel, namespace
from treeattn.collectives.runtime.reducer import Owner

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm
    from torch.distributed import ProcessGroup

    from treeattn.collectives.runtime.memory import Array

T = TypeVar("T")
C = TypeVar("C", bound="Communicator")

#: What callers pass as ``comm=``.
Given: TypeAlias = "Intracomm | ProcessGroup | Communicator | None"


class Member(NamedTuple):
    """Where one rank of a communicator runs. rank: in the whole job; node: the lowest rank of the job that
    shares memory with it; cores: a bit for each that it may run on."""

    rank: int
    node: int
    kernel: str
    namespace: str
    process: Process
    cores: int

    @classmethod
    def here(cls, rank: int, node: int) -> Member:
        """This process as the given rank on the given node."""
        cores = sum(1 << core for core in os.sched_getaffinity(0))
        return cls(rank, node, kernel(), namespace(), Process.of(os.getpid()), cores)


class Communicator(Protocol):
    """A group of ranks whose every blocking call ends the job, with one sentence, at ``TREEATTN_TIMEOUT``."""

    @property
    def library(self) -> Literal["mpi", "torch"]:
        """Whose messages it sends: also the executor that runs rounds by them from Python."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    @property
    def owner(self) -> Owner:
        """The one thread whose blocking calls go over it, unless it is of one rank."""

    @property
    def kept(self) -> dict[Any, Any]:
        """What is planned over it and lives as long as it does."""

    @property
    def members(self) -> tuple[Member, ...]:
        """The process, machine and cores of each rank."""

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """Ranks by node (shared memory domain), nodes in order of their lowest rank."""

    def allgather(self, sendobj: T, /) -> list[T]:
        """The objects of all ranks, in order of ranks."""

    def bcast(self, obj: Any, /, root: int = 0) -> Any:
        """The object of the rank `root`."""

    def bcast_array(self, array: Array, root: int) -> None:
        """Fill a C-contiguous NumPy array with that of the rank `root`, of the same size and type."""

    def exchange(self, receive: tuple[Array, int], send: tuple[Array, int]) -> Callable[[], None]:
        """Start a receive and a send, (array, peer) each; the result waits for both."""

    def barrier(self) -> None:
        """Return when all ranks have called."""

    def start_barrier(self) -> Callable[[], bool]:
        """Start one; what tells whether all ranks have."""

    def dup(self: C) -> C:
        """A communicator of the same ranks whose messages meet no others. Collective."""

    def free(self) -> None:
        """Give what `dup` made back to its library. Collective."""


def node_groups(members: Sequence[Member]) -> tuple[tuple[int, ...], ...]:
    """Ranks by node, nodes in order of their lowest rank, as `Communicator.nodes`."""
    groups: dict[int, list[int]] = {}
    for rank, member in enumerate(members):
        groups.setdefault(member.node, []).append(rank)
    return tuple(map(tuple, groups.values()))


_known: dict[int, Process] = {}


def introduce(rank: int, size: int, members: Sequence[Member]) -> None:
    """Let the watchdog look up those that this process can see. rank, size: of the job."""
    here = kernel(), namespace()
    _known.update({m.rank: m.process for m in members if (m.kernel, m.namespace) == here})
    watchdog.introduce(rank, size, lambda: _known)
