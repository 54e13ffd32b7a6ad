"""The messages of a program over MPI, as compiled code starts and tests them: persistent requests, by the
functions of the MPI library that mpi4py has loaded.

Nothing is built against an MPI: functions go by address, handles as bytes. What a handle or a status looks
like is the library's business; mpi4py knows how large they are.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from treeattn.collectives.executors.lowering import Requests
from treeattn.collectives.program import Program, messages
from treeattn.collectives.runtime.mpi_communicator import PersistentRequests
from treeattn.errors import PeerError

# (bytes of a request, bytes of a status) of the binary interfaces that are known to work: MPICH's (Intel MPI,
# MVAPICH and Cray MPICH share it), Open MPI's, and the standard one of MPI 5.
_KNOWN = {(4, 20): "MPICH", (8, 24): "Open MPI", (8, 32): "MPI standard"}

# What `struct step` of kernels/cpu/step.c calls, in its order.
_FUNCTIONS = ("MPI_Startall", "MPI_Testall", "MPI_Iprobe")


class MpiMessages(PersistentRequests):
    """The messages of one reducer, over a duplicate of its communicator."""

    def __init__(self, comm: Any, name: str, program: Program) -> None:
        """name: of the schedule. Collective. Raises `BackendError` as `duplicate` does."""
        super().__init__(comm)
        self.comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._name, self._program = name, program

    @property
    def rounds(self) -> dict[int, Requests]:
        """Handles of the requests of each round that has some."""
        self._handles = {number: _handles(given) for number, given in self._rounds.items() if given}
        return {number: Requests(each.ctypes.data, len(each)) for number, each in self._handles.items()}

    def fields(self) -> dict[str, Any]:
        """Of `StepStruct`, by which the compiled code sends."""
        self._statuses = _statuses(max(map(len, self._handles.values()), default=0) + 1)
        functions = zip(("startall", "testall", "iprobe"), _FUNCTIONS, strict=True)
        return {
            **{field: _function(name) for field, name in functions},
            "statuses": self._statuses.ctypes.data,
            "comm": _value(self.comm),
            "any_source": MPI.ANY_SOURCE,
            "any_tag": MPI.ANY_TAG,
        }

    def polled(self, poll: Callable[[], int]) -> Callable[[], int]:
        """What runs the step without waiting: testing waits for nothing."""
        return poll

    def failure(self, number: int, code: int) -> PeerError:
        """What a code of MPI in that round is raised as."""
        code, peers = self._blamed(number, code)
        reason = MPI.Get_error_string(code).splitlines()[-1].strip()
        return PeerError(f"{self._name}, round {number}: the messages with {peers} failed: {reason}")

    def _blamed(self, number: int, code: int) -> tuple[int, str]:
        """The error code of MPI, and the ranks that it is about: one, where the statuses tell which."""
        sends, receives = messages(i for i in self._program.instructions if i.round == number)
        peers = [*(message.peer for message in receives), *(message.peer for message in sends)]
        if MPI.Get_error_class(code) == MPI.ERR_IN_STATUS:
            for peer, status in zip(peers, self._statuses, strict=False):
                error = _error_of(status)
                if error not in (MPI.SUCCESS, MPI.ERR_PENDING):
                    return error, f"rank {peer}"
        return code, "ranks " + ", ".join(map(str, sorted(set(peers))))


@functools.cache
def problem() -> str | None:
    """Why compiled code cannot call this MPI library, in one line; None where it can."""
    sizes = MPI._sizeof(MPI.Request), MPI._sizeof(MPI.Status)
    if sizes not in _KNOWN:
        return (
            "the binary interface of this MPI library is unknown: handles of {}, statuses of {} bytes".format(
                *sizes
            )
        )
    lacking = [name for name in _FUNCTIONS if not hasattr(_library(), name)]
    return f"this MPI library shows no {lacking[0]}" if lacking else None


@functools.cache
def _function(name: str) -> int:
    """The address of one of its functions."""
    return ctypes.cast(getattr(_library(), name), ctypes.c_void_p).value or 0


def _handles(objects: Sequence[Any]) -> np.ndarray[Any, Any]:
    """Handles side by side, as MPI takes an array of them: [count, bytes of one]."""
    together = np.frombuffer(b"".join(map(_bytes, objects)), np.uint8)
    return together.reshape(len(objects), -1 if objects else 0).copy()


def _value(handle: Any) -> int:
    """A handle as a function takes it by value, in a whole register."""
    return int.from_bytes(_bytes(handle), sys.byteorder)


def _statuses(count: int) -> np.ndarray[Any, Any]:
    """Room for the statuses of `count` requests: [count, bytes of one]."""
    return np.zeros((count, MPI._sizeof(MPI.Status)), np.uint8)


def _error_of(status: np.ndarray[Any, Any]) -> int:
    """The error code in one of `_statuses`."""
    read = MPI.Status()
    ctypes.memmove(MPI._addressof(read), status.ctypes.data, status.nbytes)
    return read.error


def _bytes(handle: Any) -> bytes:
    return ctypes.string_at(MPI._addressof(handle), MPI._sizeof(type(handle)))


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(MPI.__file__)
