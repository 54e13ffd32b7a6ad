"""MPI_Allreduce with the merge as a user-defined operator: the MPI library chooses the algorithm.

The operator is a C function, so no Python runs inside the collective. One derived datatype per record keeps a
library from handing the operator pieces of one (Open MPI does that to buffers of basic elements), and the
operator is declared commutative (MPI standard, section 6.9.5). MPICH uses recursive doubling for every
user-defined operator; Open MPI decides by message size. Equal bits on all ranks are measured, not promised.
"""

from __future__ import annotations

import atexit
import ctypes

from mpi4py import MPI

from treeattn.collectives.libraries.collective import CollectiveReducer
from treeattn.collectives.runtime.operator import NativeOperator
from treeattn.collectives.runtime.reducer import ReductionSpec
from treeattn.errors import BackendError


class MpiAllreduce(CollectiveReducer):
    """The library's own allreduce: a call is MPI_Allreduce; ``start()`` and ``wait()`` are MPI_Iallreduce,
    which may choose another algorithm. Its operator is a `NativeOperator`.
    """

    one_collective = True

    def __init__(self, reduction: ReductionSpec) -> None:
        operator: NativeOperator = reduction.operator
        self._op = _operator(operator.mpi_function())
        super().__init__("mpi_allreduce", reduction)
        self._record = MPI._typedict[operator.dtype.char].Create_contiguous(operator.width).Commit()
        self._buffer = [reduction.buffer, len(self._records), self._record]

    def _step(self) -> None:
        self._comm.Allreduce(MPI.IN_PLACE, self._buffer, self._op)

    def _first(self) -> MPI.Request:
        return self._comm.Iallreduce(MPI.IN_PLACE, self._buffer, self._op)

    def _rest(self) -> None:
        """The one collective was all."""

    def _release(self) -> None:
        super()._release()
        self._record.Free()


plan = MpiAllreduce

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
    while _operators and not MPI.Is_finalized():
        _operators.popitem()[1].Free()
