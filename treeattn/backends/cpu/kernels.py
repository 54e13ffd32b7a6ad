"""The compiled C kernels of this processor as one library, or why there is none."""

from __future__ import annotations

import ctypes
import functools

from treeattn.backends.cpu import compile
from treeattn.errors import BackendError

__all__ = ["compiled_kernels_problem", "loaded"]


def compiled_kernels_problem() -> str | None:
    """Why the compiled kernels cannot be used here, in one line; None where they can.

    Everything here works without them, several times slower and without a warning: the caller
    knows whether to say so, and once for all ranks.

    Raises:
        ArgumentError: ``TREEATTN_ISA`` asks for what this processor lacks, or ``TREEATTN_CACHE`` cannot
            be written.
    """
    return loaded()[1]


def loaded() -> tuple[ctypes.CDLL | None, str | None]:
    """The compiled kernels, or why there are none."""
    return _load(compile.chosen_isa())


@functools.cache
def _load(isa: str) -> tuple[ctypes.CDLL | None, str | None]:
    try:
        kernels = compile.library(isa)
    except BackendError as error:
        return None, str(error)
    kernels.partial_attention.restype = ctypes.c_int64
    kernels.attention_workspace.restype = ctypes.c_int64
    kernels.decode_step.restype = ctypes.c_int64
    kernels.merge_partials.restype = None
    kernels.finish.restype = None
    kernels.multiply_rows.restype = None
    kernels.run_step.restype = ctypes.c_int64
    kernels.rescale_records.restype = None
    kernels.mpi_operator.restype = ctypes.c_void_p
    return kernels, None
