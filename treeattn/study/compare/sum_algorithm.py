"""An algorithm of the library's own sum, MPI's or NCCL's, which is named when the job is started.

Where it cannot have the sum, the libraries take another without a word: MPICH where a device's collective
stands above it or it does not serve, Open MPI for a name that it does not know and where `han` stands above
`tuned`, as it does between nodes. So all that is demanded, or written through MPI's tool interface (MPI 4.1,
chapter 15) by which a job has the library's choice beside the algorithm. NCCL ends with an error for a name
that it does not know or that does not serve, but for a tuner's choice: its own trace says what ran.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import socket
from pathlib import Path
from typing import Any

from treeattn.collectives.runtime import nccl
from treeattn.collectives.runtime.reducer import Reducer, ReductionSpec
from treeattn.errors import ArgumentError, BackendError, TreeattnError
from treeattn.mpi import library
from treeattn.mpi.communicators import collectively
from treeattn.partial import Array
from treeattn.study.compare.rows import Key

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
            _demand(name, {prefix + chosen: name, **demanded})
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


class NcclAlgorithm:
    """The algorithm and protocol `name` of ncclAllReduce, such as ``ring/ll``, for communicators that are
    made after `use`; of those after `leave`, NCCL's choice: each reads the variables when it is made.

    Raises `ArgumentError` where the job was not started for it, and before NCCL 2.24, whose trace has no
    names.
    """

    _RAN = re.compile(r"AllReduce: \d+ Bytes -> Algo (\w+) proto (\w+)")  # enqueue.cc, of rank 0

    def __init__(self, name: str) -> None:
        if (problem := nccl.problem()) or nccl.version() < (2, 24):
            raise ArgumentError(
                f"algorithm {name} needs NCCL 2.24, whose trace names it: {problem or 'older'}"
            )
        algorithm, _, protocol = name.partition("/")
        self._name = name.casefold()
        self._named = {"NCCL_ALGO": f"allreduce:{algorithm}", "NCCL_PROTO": f"allreduce:{protocol}"}
        _demand(name, {**self._named, "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "TUNING"})
        file = os.environ.get("NCCL_DEBUG_FILE", "")
        host = socket.gethostname().partition(".")[0]
        self._trace = Path(file.replace("%h", host).replace("%p", str(os.getpid())))
        self.leave()

    def use(self) -> None:
        """Put the variables back that the job was started with."""
        os.environ.update(self._named)

    def leave(self) -> None:
        """Take them away."""
        for variable in self._named:
            os.environ.pop(variable, None)

    def check_ran(self) -> None:
        """Raise `BackendError` unless the last sum of this process, rank 0, was by this algorithm."""
        try:
            ran = self._RAN.findall(self._trace.read_text())
        except OSError:
            ran = []
        if (last := "/".join(*(ran[-1:] or [()])).casefold()) != self._name:
            raise BackendError(
                f"NCCL's trace {self._trace} names {last or 'no sum'} where {self._name} was asked for: "
                f"jobs/library_algorithm.sbatch {self._name} starts it, and no tuner may choose"
            )


def _demand(name: str, variables: dict[str, str]) -> None:
    for variable, value in variables.items():
        if os.environ.get(variable) != value:
            raise ArgumentError(
                f"algorithm {name} needs {variable}={value} from the start of the job, else the "
                f"library takes another without a word: jobs/library_algorithm.sbatch {name}"
            )


@functools.cache
def sum_algorithm(name: str) -> Any:
    """The one of a name, NCCL's as ALGORITHM/PROTOCOL: made where it is first asked for, before anything is
    measured."""
    return (NcclAlgorithm if "/" in name else SumAlgorithm)(name)


def nccl_sum(key: Key, reduction: ReductionSpec, mine: Array) -> Reducer:
    """ncclAllReduce in place, as one CUDA graph from the second step on, as schedules are; by the key's
    algorithm, or by NCCL's choice. Collective."""
    from treeattn.collectives.runtime.cuda_graph import CudaGraphReducer
    from treeattn.decoder import gpu_reducers  # loaded where there are GPUs

    connected = gpu_reducers.connected_by_nccl(reduction.comm, reduction.memory)

    def add() -> None:
        connected.all_reduce(mine, "sum")

    if key.algorithm:
        try:
            collectively(reduction.comm, add)
            check = sum_algorithm(key.algorithm).check_ran
            collectively(reduction.comm, tuple if reduction.comm.rank else check)
        except TreeattnError:
            connected.abort()
            raise
    return CudaGraphReducer(key.scheme, connected, reduction.memory, add)
