"""MPI communicators whose blocking calls are watched: none of them waits longer than ``TREEATTN_TIMEOUT``.

The messages of a program are here, too, as compiled code starts and tests them: persistent requests, by the
functions of the MPI library that mpi4py has loaded.
Nothing is built against an MPI: functions go by address, handles as bytes. What a handle or a status looks
like is the library's business; mpi4py knows how large they are.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import re
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np
from mpi4py import MPI

from treeattn.collectives.runtime import communicator, watchdog
from treeattn.collectives.runtime.communicator import Member
from treeattn.collectives.runtime.memory import Array, PeerArray, Requests
from treeattn.collectives.runtime.reducer import Messages, owner_of_communicator
from treeattn.errors import BackendError, PeerError

# Calls that return without the other ranks. Whatever else a communicator has, or comes to have, is watched.
_LOCAL = re.compile(
    r"_|I[a-z]|i[a-z_]+$|Get_|Set_|.*_init$|.*(keyval|_attr|errhandler)$|(Cart|Graph)_map"
    r"|f2py|py2f|toint|fromint|fromhandle|Abort|Ack_failed|Compare|Revoke"
)


_turns = threading.RLock()


def _no_communicator(error: Any) -> BackendError:
    """What to raise for an exception of MPI that says that there are no more communicators."""
    return BackendError(
        f"MPI gives no communicator ({_said(error.Get_error_code())}): decoders and reducers keep one each "
        "until close() or the end of their with statement; for good where an exception ended that"
    )


class MpiCommunicator(MPI.Intracomm):
    """An intracommunicator of MPI of which every blocking call counts itself for the watchdog.

    It is used as mpi4py's own, and communicators that its calls make are watched, too. `members` tells where
    each rank runs.
    """

    library: Literal["mpi"] = "mpi"
    members: tuple[Member, ...] = ()

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._wait = watchdog.WatchedCalls()
        self.owner, self.kept = owner_of_communicator(self.size), dict[Any, Any]()

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
        """A communicator of the same ranks whose messages meet no others. Raises `BackendError` where the MPI
        library has none left: each that is not freed keeps one."""
        try:
            made: Any = self.Dup()
        except MPI.Exception as error:
            raise _no_communicator(error) from error
        made.Set_errhandler(MPI.ERRORS_RETURN)
        return made  # type: ignore[no-any-return]

    def free(self) -> None:
        self.Free()

    def exchange(self, receive: tuple[Array, int], send: tuple[Array, int]) -> Callable[[], None]:
        start = self._wait.run("exchange", lambda: [self.Irecv(*receive), self.Isend(*send)])
        return functools.partial(self._run, "Waitall", MPI.Request.Waitall, start)

    def _run(self, name: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """A blocking call, of the owner alone. Threads of a rank that is alone, where none of them can wait
        for another, take turns, as MPI asks them to. Raises `StateError`."""
        if self.size == 1:
            with _turns:
                return self._wait.run(name, call, *arguments, **options)
        if threading.get_ident() != self.owner.thread:
            self.owner.take()
        return self._wait.run(name, call, *arguments, **options)

    def start_barrier(self) -> Callable[[], bool]:
        return self.Ibarrier().Test

    def _exchange(self) -> tuple[Member, ...]:
        own = MPI.COMM_WORLD.rank
        with watchdog.Activity("looking for the nodes"):
            try:
                shared: Any = self.Split_type(MPI.COMM_TYPE_SHARED, key=self.rank)
            except MPI.Exception as error:
                raise _no_communicator(error) from error
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


def duplicate(comm: MPI.Intracomm) -> MpiCommunicator:
    """A private communicator of the same ranks for a planned reduction. Collective; raises as `dup`."""
    with watchdog.Activity("planning a reduction"):
        return MpiCommunicator.of(comm).dup()


# (bytes of a request, bytes of a status) of the binary interfaces that are known to work: MPICH's (Intel MPI,
# MVAPICH and Cray MPICH share it), Open MPI's, and the standard one of MPI 5.
_KNOWN = {(4, 20): "MPICH", (8, 24): "Open MPI", (8, 32): "MPI standard"}

# Field of `struct step` of kernels/cpu/step.c -> what is called there.
_FUNCTIONS = {"startall": "MPI_Startall", "testall": "MPI_Testall", "iprobe": "MPI_Iprobe"}


class MpiMessages(Messages):
    """Persistent requests (MPI standard, section 3.9), which must be freed before MPI_Finalize, over a
    duplicate of the communicator. A rank alone has no messages and takes none: threads come and go, each with
    plans of its own, and MPI's communicators are few."""

    def __init__(self, comm: Any, name: str) -> None:
        """Collective. Raises `BackendError` as `duplicate` does."""
        super().__init__(name)
        self._comm = duplicate(comm) if comm.size > 1 else MPI.COMM_SELF
        self._rounds: defaultdict[int, list[MPI.Prequest]] = defaultdict(list)

    def add(self, number: int, receives: Iterable[PeerArray], sends: Iterable[PeerArray]) -> None:
        """Plan a round's, whose number is their tag: a fast neighbour may be ahead."""
        for init, given in ((self._comm.Recv_init, receives), (self._comm.Send_init, sends)):
            for array, peer in given:
                self._rounds[number].append(init(array, peer, number))
                self._peers[number].append(peer)

    def start(self, number: int) -> None:
        MPI.Prequest.Startall(self._rounds[number])

    def test(self, number: int) -> bool:
        return MPI.Prequest.Testall(self._rounds[number])

    def wait(self, number: int) -> None:
        MPI.Prequest.Waitall(self._rounds[number])

    @property
    def rounds(self) -> dict[int, Requests]:
        self._handles = {number: _handles(given) for number, given in self._rounds.items()}
        return {number: Requests(each.ctypes.data, len(each)) for number, each in self._handles.items()}

    def fields(self) -> dict[str, Any]:
        most = max(map(len, self._handles.values()), default=0)
        self._statuses = np.zeros((most + 1, MPI._sizeof(MPI.Status)), np.uint8)
        return {
            **{field: _function(name) for field, name in _FUNCTIONS.items()},
            "statuses": self._statuses.ctypes.data,
            "comm": int.from_bytes(_bytes(self._comm), sys.byteorder),  # by value, in a whole register
            "any_source": MPI.ANY_SOURCE,
            "any_tag": MPI.ANY_TAG,
        }

    def failure(self, number: int, code: int) -> PeerError:
        """Of one rank, where the statuses tell which."""
        in_status = MPI.Get_error_class(code) == MPI.ERR_IN_STATUS
        errors = map(_error_of, self._statuses if in_status else ())
        for peer, error in zip(self._peers[number], errors, strict=False):
            if error not in (MPI.SUCCESS, MPI.ERR_PENDING):
                return self.lost(number, _said(error), [peer])
        return self.lost(number, _said(code))

    def free(self) -> None:
        """Free the requests, none of which may be active; the MPI library may be at its end already."""
        for requests in self._rounds.values():
            while requests and not MPI.Is_finalized():
                requests.pop().Free()

    def close(self) -> None:
        self.free()
        if self._comm != MPI.COMM_SELF:
            self._comm.Free()


def _said(code: int) -> str:
    return MPI.Get_error_string(code).splitlines()[-1].strip()


@functools.cache
def problem() -> str | None:
    """Why compiled code cannot call this MPI library, in one line; None where it can."""
    sizes = MPI._sizeof(MPI.Request), MPI._sizeof(MPI.Status)
    if sizes not in _KNOWN:
        unknown = "the binary interface of this MPI library is unknown: handles of {}, statuses of {} bytes"
        return unknown.format(*sizes)
    lacking = [name for name in _FUNCTIONS.values() if not hasattr(_library(), name)]
    return f"this MPI library shows no {lacking[0]}" if lacking else None


@functools.cache
def _function(name: str) -> int:
    """The address of one of its functions."""
    return ctypes.cast(getattr(_library(), name), ctypes.c_void_p).value or 0


def _handles(objects: Sequence[Any]) -> np.ndarray[Any, Any]:
    """Handles side by side, as MPI takes an array of them: [count, bytes of one]."""
    return np.frombuffer(b"".join(map(_bytes, objects)), np.uint8).reshape(len(objects), -1).copy()


def _error_of(status: np.ndarray[Any, Any]) -> int:
    """The error code in one status."""
    read = MPI.Status()
    ctypes.memmove(MPI._addressof(read), status.ctypes.data, status.nbytes)
    return read.error


def _bytes(handle: Any) -> bytes:
    return ctypes.string_at(MPI._addressof(handle), MPI._sizeof(type(handle)))


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(MPI.__file__)
