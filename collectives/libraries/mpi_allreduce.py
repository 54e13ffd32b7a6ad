"""MPI_Allreduce with the merge as a user-defined operator: the MPI library chooses the algorithm.

The operator is a C function, so no Python runs inside the collective. One derived datatype per record keeps a
library from handing the operator pieces of one (Open MPI does that to buffers of basic elements), and the
operator is declared commutative (MPI standard, section 6.9.5). MPICH uses recursive doubling for every
user-defined operator; Open MPI decides by message size. Equal bits on all ranks are measured, not promised.
"""

from __future__ import annotations

import atexit
import ctypes
from typing import Any, Protocol

from mpi4py import MPI

from treeattn.collectives.operator import Operator
from treeattn.errors import BackendError, ScheduleError

__all__ = ["MpiAllreduce"]


class MpiOperator(Operator, Protocol):
    """An operator that has a compiled form."""

    def mpi_function(self) -> int:
        """Address of an MPI_User_function that merges records. Raises `BackendError` where there is none."""


class MpiAllreduce:
    """A reducer (see `executors.mpi.Reducer`) over the library's own allreduce. Creating it is collective.

    A call is one blocking MPI_Allreduce; ``start()`` and ``wait()`` are MPI_Iallreduce, which may choose
    another algorithm. Raises `BackendError` without compiled kernels.
    """

    def __init__(self, comm: MPI.Intracomm, operator: MpiOperator, buffer: Any) -> None:
        if not buffer.flags.c_contiguous or buffer.dtype != operator.dtype:
            raise ScheduleError(f"mpi_allreduce: the buffer must be C-contiguous {operator.dtype}")
        self._op = _operator(operator.mpi_function())
        self._comm = comm.Dup()
        self._record = MPI._typedict[operator.dtype.char].Create_contiguous(operator.width).Commit()
        self._buffer = [buffer, buffer.size // operator.width, self._record]
        self._request: MPI.Request | None = None
        self._closed = False

    def __call__(self) -> None:
        """One whole step."""
        if self._closed or self._request is not None:
            raise ScheduleError("mpi_allreduce: a step on a reducer that is closed or already running")
        self._comm.Allreduce(MPI.IN_PLACE, self._buffer, self._op)

    def start(self) -> None:
        """Begin a step."""
        if self._closed or self._request is not None:
            raise ScheduleError("mpi_allreduce: start() on a reducer that is closed or already running")
        self._request = self._comm.Iallreduce(MPI.IN_PLACE, self._buffer, self._op)

    def wait(self) -> None:
        """Finish the step that `start` began."""
        if self._request is None:
            raise ScheduleError("mpi_allreduce: wait() without start()")
        self._request.Wait()
        self._request = None

    def close(self) -> None:
        """Free datatype and communicator. Collective; a second call does nothing."""
        if not self._closed:
            self._record.Free()
            self._comm.Free()
            self._closed = True

    def __enter__(self) -> MpiAllreduce:
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is None:
            self.close()
        self._closed = True


# One operator per function, made once and kept: it must outlive every reduction that uses it.
_operators: dict[int, MPI.Op] = {}


def _operator(function: int) -> MPI.Op:
    """The commutative MPI operator of a C function, made by the library that mpi4py has loaded."""
    if function not in _operators:
        create = ctypes.CDLL(MPI.__file__).MPI_Op_create
        # A handle is an int in MPICH and a pointer in Open MPI and in the MPI 5 ABI.
        handle = (
            ctypes.c_void_p if MPI._sizeof(MPI.Op) == ctypes.sizeof(ctypes.c_void_p) else ctypes.c_uint
        )(0)
        code = create(ctypes.c_void_p(function), ctypes.c_int(1), ctypes.byref(handle))
        if code != MPI.SUCCESS or not handle.value:
            raise BackendError(f"mpi_allreduce: MPI_Op_create failed with code {code}")
        _operators[function] = MPI.Op.fromhandle(handle.value)
    return _operators[function]


@atexit.register
def _free_operators() -> None:
    while _operators:
        _operators.popitem()[1].Free()
