"""MPI communicators whose blocking calls are watched: none of them waits longer than ``TREEATTN_TIMEOUT``."""

from __future__ import annotations

import functools
import inspect
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from mpi4py import MPI

from treeattn.collectives.runtime import communicator, watchdog
from treeattn.collectives.runtime.communicator import Member
from treeattn.collectives.runtime.memory import Array, Message
from treeattn.collectives.runtime.owner import of_communicator
from treeattn.collectives.runtime.reducer import duplicate
from treeattn.errors import no_communicator

# Calls that return without the other ranks. Whatever else a communicator has, or comes to have, is watched.
_LOCAL = re.compile(
    r"_|I[a-z]|i[a-z_]+$|Get_|Set_|.*_init$|.*(keyval|_attr|errhandler)$|(Cart|Graph)_map"
    r"|f2py|py2f|toint|fromint|fromhandle|Abort|Ack_failed|Compare|Revoke"
)


_turns = threading.RLock()


class MpiCommunicator(MPI.Intracomm):
    """An intracommunicator of MPI of which every blocking call counts itself for the watchdog.

    It is used as mpi4py's own, and communicators that its calls make are watched, too. `members` tells where
    each rank runs.
    """

    library: Literal["mpi"] = "mpi"
    members: tuple[Member, ...] = ()

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._wait = watchdog.WatchedCalls()
        self.owner, self.kept = of_communicator(self.size), dict[Any, Any]()

    @classmethod
    def of(cls, comm: MPI.Intracomm) -> MpiCommunicator:
        """The watched form of a communicator, made once and kept with it. Collective for the first time."""
        if isinstance(comm, cls):
            return comm
        known: Any = comm.Get_attr(_keyval())
        if known is None:
            known = cls(comm)
            known.members = known._exchange()
            communicator.introduce(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size, known.members)
            comm.Set_attr(_keyval(), known)
        made: MpiCommunicator = known
        return made

    @property
    def unwatched(self) -> MPI.Intracomm:
        """The same communicator for the calls of a step, which counts itself."""
        return MPI.Intracomm(self)

    @functools.cached_property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        return communicator.node_groups(self.members)

    def bcast_array(self, array: Array, root: int) -> None:
        self.Bcast(array.view("u1"), root=root)

    def dup(self) -> MpiCommunicator:
        """A communicator of the same ranks whose messages meet no others. Raises `BackendError` where the
        MPI library has none left: each that is not freed keeps one."""
        try:
            made: Any = self.Dup()
        except MPI.Exception as error:
            raise no_communicator(error) from error
        return made  # type: ignore[no-any-return]

    def free(self) -> None:
        self.Free()

    def lent(self) -> MpiCommunicator:
        """The same, for plans of one owner that take turns: `dup` of it is itself, `free` does nothing."""
        made = _Lent(self)
        made.members, made.owner = self.members, self.owner
        return made

    def exchange(self, receive: tuple[Array, int], send: tuple[Array, int]) -> Callable[[], None]:
        start = self._wait.run("exchange", lambda: [self.Irecv(*receive), self.Isend(*send)])
        return functools.partial(self.wait_all, start)

    def wait_all(self, requests: Sequence[MPI.Request]) -> None:
        """Return when all requests of this communicator are done."""
        self._run("Waitall", MPI.Request.Waitall, requests)

    def _run(self, name: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """A blocking call, of the owner alone. Threads of a rank that is alone, where none of them can wait
        for another, take turns, as MPI asks them to. Raises `StateError`."""
        if self.size == 1:
            with _turns:
                return self._wait.run(name, call, *arguments, **options)
        if threading.get_ident() != self.owner.thread:
            self.owner.take()
        return self._wait.run(name, call, *arguments, **options)

    def barrier_asleep(self) -> None:
        """A barrier that leaves the CPU to other ranks, which may work for as long as they run."""
        everyone = self.Ibarrier()
        with watchdog.Guarded("the barrier between measurements", patient=True):
            while not everyone.Test():
                time.sleep(0.002)

    def _exchange(self) -> tuple[Member, ...]:
        own = MPI.COMM_WORLD.rank
        with watchdog.Activity("looking for the nodes"):
            try:
                shared: Any = self.Split_type(MPI.COMM_TYPE_SHARED, key=self.rank)
            except MPI.Exception as error:
                raise no_communicator(error) from error
            here = Member.here(own, shared.bcast(own))
            shared.Free()
            return tuple(self.allgather(here))

    def _part(self, comm: MPI.Intracomm) -> MpiCommunicator:
        """The watched form of a communicator of some of these ranks."""
        own, group = self.Get_group(), comm.Get_group()
        ranks = group.Translate_ranks(None, own)
        own.Free()
        group.Free()
        part = MpiCommunicator(comm)
        part.members = tuple(self.members[rank] for rank in ranks) if self.members else ()
        return part


class _Lent(MpiCommunicator):
    """As `MpiCommunicator.lent`. Messages of one plan do not meet another's: all ranks take them in turn, and
    MPI keeps the order of those with one tag."""

    def dup(self) -> MpiCommunicator:
        return self

    def Free(self) -> None:
        """Its owner does that."""


def _watched(name: str) -> Callable[..., Any]:
    call = getattr(MPI.Intracomm, name)

    @functools.wraps(call)
    def run(self: MpiCommunicator, *arguments: Any, **options: Any) -> Any:
        made = self._run(name, call, self, *arguments, **options)
        if isinstance(made, MPI.Intracomm) and made != MPI.COMM_NULL:
            return self._part(made)
        return made

    return run


for _name in set(dir(MPI.Intracomm)) - set(vars(MpiCommunicator)):
    _static = inspect.getattr_static(MPI.Intracomm, _name)
    if callable(_static) and not isinstance(_static, type) and not _LOCAL.match(_name):
        setattr(MpiCommunicator, _name, _watched(_name))


@functools.cache
def _keyval() -> int:
    return MPI.Comm.Create_keyval()


class PersistentRequests:
    """The persistent requests of one reducer (MPI standard, section 3.9), which must be freed before
    MPI_Finalize, and a duplicate of its communicator."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        """Collective. Raises `BackendError` as `duplicate` does."""
        self.comm = duplicate(comm)
        self._requests: list[MPI.Prequest] = []
        self._rounds: dict[int, list[MPI.Prequest]] = {}

    def receive(self, array: Array, peer: int, tag: int) -> MPI.Prequest:
        self._requests.append(self.comm.Recv_init(array, peer, tag))
        return self._requests[-1]

    def send(self, array: Array, peer: int, tag: int) -> MPI.Prequest:
        self._requests.append(self.comm.Send_init(array, peer, tag))
        return self._requests[-1]

    def add(self, number: int, receives: Iterable[Message], sends: Iterable[Message]) -> list[MPI.Prequest]:
        """Plan the messages (array, peer) of a round. Its number is their tag: a fast neighbour may be
        ahead."""
        self._rounds[number] = [self.receive(array, peer, number) for array, peer in receives]
        self._rounds[number] += [self.send(array, peer, number) for array, peer in sends]
        return self._rounds[number]

    def start(self, number: int) -> None:
        MPI.Prequest.Startall(self._rounds[number])

    def test(self, number: int) -> bool:
        return MPI.Prequest.Testall(self._rounds[number])

    def wait(self, number: int) -> None:
        MPI.Prequest.Waitall(self._rounds[number])

    def free(self) -> None:
        """Free the requests, none of which may be active; the MPI library may be at its end already."""
        while self._requests and not MPI.Is_finalized():
            self._requests.pop().Free()

    def close(self) -> None:
        self.free()
        self.comm.free()
