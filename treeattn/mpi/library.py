"""The MPI library that mpi4py loads, and what can be asked of it without communication."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from treeattn.errors import BackendError, MissingPackageError


def load(initialize: bool = True) -> Any:
    """The `mpi4py.MPI` module, whose first import initialises MPI unless it is told not to.

    Raises `BackendError` where no MPI library can be loaded.
    """
    try:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.initialize and initialize
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        lacking = "mpi4py mpich" if getattr(error, "name", None) == "mpi4py" else "mpich"
        raise MissingPackageError(
            f"no MPI library could be loaded ({reason}): install one with `pip install {lacking}`, or load "
            "your site's MPI module; ranks of torchrun call torch.distributed.init_process_group instead"
        ) from error
    return MPI


def is_error(error: Exception) -> bool:
    """Whether the MPI library raised this, as where a rank has ended."""
    return type(error).__module__ == "mpi4py.MPI"


def version() -> str | None:
    """What the MPI library calls itself, or None where none can be loaded."""
    try:
        name: str = load().Get_library_version()
    except BackendError:
        return None
    return name.split("\n")[0].strip(" \t\x00")


def thread_level() -> int:
    """How many threads may call MPI at once, as mpi4py is set to ask for."""
    import mpi4py

    wanted = mpi4py.rc.thread_level if mpi4py.rc.threads else "single"
    level: int = getattr(load(), f"THREAD_{wanted.upper()}")
    return level


def cuda_aware() -> bool | None:
    """Whether the MPI library says that it takes CUDA device pointers; None: it has no way of telling.

    Asked of the library that mpi4py has loaded: MPIX_Query_cuda_support (Open MPI, MPICH) or
    MPIX_GPU_query_support (MPICH and its descendants), neither of them in the standard. It is what the
    library was built and started for: whether device pointers really arrive, only a trial can tell.
    """
    functions = ctypes.CDLL(load().__file__)
    if hasattr(functions, "MPIX_Query_cuda_support"):
        return bool(functions.MPIX_Query_cuda_support())
    if hasattr(functions, "MPIX_GPU_query_support"):
        cuda, answer = ctypes.c_int(0), ctypes.c_int(0)  # MPIX_GPU_SUPPORT_CUDA is 0
        return functions.MPIX_GPU_query_support(cuda, ctypes.byref(answer)) == 0 and bool(answer.value)
    return None


def started() -> bool:
    """Whether this process takes part in MPI already."""
    module = sys.modules.get("mpi4py.MPI")
    initialized = getattr(module, "Is_initialized", None)  # a signal may come while it is being imported
    return module is not None and initialized is not None and initialized() and not module.Is_finalized()
