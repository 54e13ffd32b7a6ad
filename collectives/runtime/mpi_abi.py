"""The MPI library that mpi4py has loaded, as compiled code calls it: functions by address, handles as bytes.

Nothing is built against an MPI. What a handle or a status looks like is the library's business; mpi4py knows
how large they are.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

__all__ = ["FUNCTIONS", "error_of", "function", "handles", "problem", "statuses", "value"]

# (bytes of a request, bytes of a status) of the binary interfaces that are known to work: MPICH's (Intel MPI,
# MVAPICH and Cray MPICH share it), Open MPI's, and the standard one of MPI 5.
_KNOWN = {(4, 20): "MPICH", (8, 24): "Open MPI", (8, 32): "MPI standard"}

#: What `struct step` of kernels/cpu/step.c calls, in its order.
FUNCTIONS = ("MPI_Startall", "MPI_Testall", "MPI_Iprobe")


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
    lacking = [name for name in FUNCTIONS if not hasattr(_library(), name)]
    return f"this MPI library shows no {lacking[0]}" if lacking else None


def function(name: str) -> int:
    """The address of one of its functions."""
    address: int = ctypes.cast(getattr(_library(), name), ctypes.c_void_p).value or 0
    return address


def handles(objects: Sequence[Any]) -> np.ndarray[Any, Any]:
    """Handles side by side, as MPI takes an array of them: [count, bytes of one]."""
    together = np.frombuffer(b"".join(map(_bytes, objects)), np.uint8)
    return together.reshape(len(objects), -1 if objects else 0).copy()


def value(handle: Any) -> int:
    """A handle as a function takes it by value, in a whole register."""
    return int.from_bytes(_bytes(handle), sys.byteorder)


def statuses(count: int) -> np.ndarray[Any, Any]:
    """Room for the statuses of `count` requests: [count, bytes of one]."""
    return np.zeros((count, MPI._sizeof(MPI.Status)), np.uint8)


def error_of(status: np.ndarray[Any, Any]) -> int:
    """The error code in one of `statuses`."""
    read = MPI.Status()
    ctypes.memmove(MPI._addressof(read), status.ctypes.data, status.nbytes)
    return read.error


def _bytes(handle: Any) -> bytes:
    return ctypes.string_at(MPI._addressof(handle), MPI._sizeof(type(handle)))


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(MPI.__file__)
