"""MPI communicators whose blocking calls are watched: none of them waits longer than ``TREEATTN_TIMEOUT``."""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeVar

from mpi4py import MPI

from treeattn.collectives.runtime import watchdog
from treeattn.collectives.runtime.process import Process, kernel, namespace
from treeattn.errors import no_communicator

__all__ = ["Member", "MpiCommunicator"]

T = TypeVar("T")

# Calls that return without the other ranks. Whatever else a communicator has, or comes to have, is watched.
_LOCAL = re.compile(
    r"_|I[a-z]|i[a-z_]+$|Get_|Set_|.*_init$|.*(keyval|_attr|errhandler)$|(Cart|Graph)_map"
    r"|f2py|py2f|toint|fromint|fromhandle|Abort|Ack_failed|Compare|Revoke"
)


class Member(NamedTuple):
    """Where one rank of a communicator runs. rank: in the whole job; node: the lowest rank of the job that
    shares memory with it; cores: a bit for each that it may run on."""

    rank: int
    node: int
    kernel: str
    namespace: str
    process: Process
    cores: int


class MpiCommunicator(MPI.Intracomm):
    """An intracommunicator of MPI of which every blocking call counts itself for the watchdog.

    It is used as mpi4py's own, and communicators that its calls make are watched, too. `members` tells where
    each rank runs.
    """

    members: tuple[Member, ...] = ()

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._wait = _Wait()

    @classmethod
    def of(cls, comm: MPI.Intracomm) -> MpiCommunicator:
        """The watched form of a communicator, made once and kept with it. Collective for the first time."""
        if isinstance(comm, cls):
            return comm
        known: Any = comm.Get_attr(_keyval())
        if known is None:
            known = cls(comm)
            known.members = known._exchange()
            _introduce(known.members)
            comm.Set_attr(_keyval(), known)
        made: MpiCommunicator = known
        return made

    @property
    def unwatched(self) -> MPI.Intracomm:
        """The same communicator for the calls of a step, which counts itself."""
        return MPI.Intracomm(self)

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """Ranks by node (shared memory domain), nodes in order of their lowest rank."""
        groups: dict[int, list[int]] = {}
        for rank, member in enumerate(self.members):
            groups.setdefault(member.node, []).append(rank)
        return tuple(map(tuple, groups.values()))

    def dup(self) -> MpiCommunicator:
        """A communicator of the same ranks whose messages meet no others. Raises `BackendError` where the
        MPI library has none left: each that is not freed keeps one."""
        try:
            made: Any = self.Dup()
        except MPI.Exception as error:
            raise no_communicator(error) from error
        return made  # type: ignore[no-any-return]

    def free(self) -> None:
        """Give it back to MPI."""
        self.Free()

    def wait_all(self, requests: Sequence[MPI.Request]) -> None:
        """Return when all requests of this communicator are done."""
        self._wait.run("Waitall", MPI.Request.Waitall, requests)

    def barrier_asleep(self) -> None:
        """A barrier that leaves the CPU to other ranks, which may work for as long as they run."""
        everyone = self.Ibarrier()
        with watchdog.Guarded("the barrier between measurements", patient=True):
            while not everyone.Test():
                time.sleep(0.002)

    def _exchange(self) -> tuple[Member, ...]:
        own, cores = MPI.COMM_WORLD.rank, sum(1 << core for core in os.sched_getaffinity(0))
        with watchdog.Activity("looking for the nodes"):
            try:
                shared: Any = self.Split_type(MPI.COMM_TYPE_SHARED, key=self.rank)
            except MPI.Exception as error:
                raise no_communicator(error) from error
            here = Member(own, shared.bcast(own), kernel(), namespace(), Process.of(os.getpid()), cores)
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


class _Wait:
    """The calls of one communicator as the watchdog sees them."""

    def __init__(self) -> None:
        self.blocking = self._number = 0
        self._call = ""
        watchdog.register(self)

    def run(self, name: str, call: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """What a blocking call gives."""
        self._call = name
        self._number = self.blocking = self._number + 1
        try:
            return call(*arguments, **options)
        finally:
            self.blocking = 0

    def waits_for(self) -> tuple[str, str]:
        """The activity of the caller, or the call and where it was made; peers."""
        return watchdog.current_activity() or (f"{self._call}{self._where()}", "the other ranks")

    def _where(self) -> str:
        for frame in itertools.chain.from_iterable(map(_up, sys._current_frames().values())):
            if frame.f_code is _Wait.run.__code__ and frame.f_locals["self"] is self:
                caller = next(outer for outer in _up(frame) if outer.f_code.co_filename != __file__)
                return f" in {caller.f_code.co_name} ({_shown(caller)})"
        return ""


def _up(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _shown(frame: FrameType) -> str:
    """File and line, the file from the package's folder on."""
    folder = Path(__file__).absolute().parents[3]
    path = Path(frame.f_code.co_filename)
    return f"{path.relative_to(folder) if path.is_relative_to(folder) else path.name}:{frame.f_lineno}"


def _watched(name: str) -> Callable[..., Any]:
    call = getattr(MPI.Intracomm, name)

    @functools.wraps(call)
    def run(self: MpiCommunicator, *arguments: Any, **options: Any) -> Any:
        made = self._wait.run(name, call, self, *arguments, **options)
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


_known: dict[int, Process] = {}


def _introduce(members: Sequence[Member]) -> None:
    """Let the watchdog look up those that this process can see."""
    here = kernel(), namespace()
    _known.update({m.rank: m.process for m in members if (m.kernel, m.namespace) == here})
    watchdog.introduce(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size, lambda: _known)
