"""An algorithm of the MPI library's own sum, which is named when the job is started.

Where it cannot have the sum, the libraries take another without a word: MPICH where a device's collective
stands above it or it does not serve, Open MPI for a name that it does not know and where `han` stands above
`tuned`, as it does between nodes. So all that is demanded, or written through MPI's tool interface (MPI 4.1,
chapter 15) by which a job has the library's choice beside the algorithm.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

from treeattn.errors import ArgumentError, BackendError
from treeattn.mpi import library

# What names the algorithm, 0 for none; its prefix in the environment; what else has to be there; what lets
# the algorithm have the sum, and when.
_LIBRARIES = (
    (
        "MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM", "",
        {"MPIR_CVAR_COLLECTIVE_FALLBACK": "error", "MPIR_CVAR_DEVICE_COLLECTIVES": "percoll"},
        "MPIR_CVAR_ALLREDUCE_DEVICE_COLLECTIVE", 0,
    ),
    (
        "coll_tuned_allreduce_algorithm", "OMPI_MCA_",
        {"OMPI_MCA_coll_tuned_use_dynamic_rules": "1"},
        "coll_tuned_priority", 100,
    ),
)  # fmt: skip

# Algorithms that the libraries replace all the same, and where.
_REPLACED = {
    "segmented_ring": "needs a segment size, without which Open MPI takes another",
    "ccl": "needs an MPICH with CCL, and any other takes its own choice",
}


class SumAlgorithm:
    """The algorithm `name` of MPI_Allreduce; until `use` the library has its choice.

    Raises `ArgumentError` where the job was not started for it, and where the library has none of that name
    or may run another under it.
    """

    def __init__(self, name: str) -> None:
        if name in _REPLACED or name.isdecimal():
            raise ArgumentError(f"algorithm {name} {_REPLACED.get(name, 'is a number: give its name')}")
        self._mpi = ctypes.CDLL(library.load().__file__)
        self._ask("init_thread", 0, ctypes.byref(ctypes.c_int()))
        for chosen, prefix, demanded, above, let in _LIBRARIES:
            if (handle := self._handle(chosen)) is None:
                continue
            for variable, value in {prefix + chosen: name, **demanded}.items():
                if os.environ.get(variable) != value:
                    raise ArgumentError(
                        f"algorithm {name} needs {variable}={value} from the start of the job, else the "
                        f"library takes another without a word: jobs/library_algorithm.sbatch {name}"
                    )
            self._handles = handle, self._handle(above)
            number, self._own = self._read(handle), (0, self._read(self._handles[1]))
            self._named = number, let
            self.leave()
            if number:
                return
        raise ArgumentError(
            f"{library.version()} has no algorithm {name} of MPI_Allreduce that can be chosen"
        )

    def use(self) -> None:
        """Of communicators that are made from now on, and of their calls until `leave`. On every rank."""
        self._write(self._named)

    def leave(self) -> None:
        """Back to the library's choice."""
        self._write(self._own)

    def _handle(self, variable: str) -> Any:
        """Of a variable of the library; None where it has none of this name."""
        index, handle = ctypes.c_int(), ctypes.c_void_p()
        if self._mpi.MPI_T_cvar_get_index(variable.encode(), ctypes.byref(index)):
            return None
        self._ask("cvar_handle_alloc", index, None, ctypes.byref(handle), ctypes.byref(ctypes.c_int()))
        return handle

    def _read(self, handle: Any) -> int:
        value = ctypes.c_int()
        self._ask("cvar_read", handle, ctypes.byref(value))
        return value.value

    def _write(self, values: tuple[int, int]) -> None:
        for handle, value in zip(self._handles, values, strict=True):
            self._ask("cvar_write", handle, ctypes.byref(ctypes.c_int(value)))

    def _ask(self, function: str, *given: Any) -> None:
        if code := getattr(self._mpi, f"MPI_T_{function}")(*given):
            raise BackendError(f"{library.version()}: MPI_T_{function} failed with code {code}")


#: The one of a name, made where it is first asked for: before anything is measured.
sum_algorithm = functools.cache(SumAlgorithm)
