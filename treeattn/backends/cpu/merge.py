"""How records merge on the processor: the compiled kernel, or NumPy; the same bits."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from treeattn import partial
from treeattn.backends.cpu import arguments, kernels
from treeattn.backends.cpu.arguments import Array
from treeattn.backends.cpu.rescale import rescale_records
from treeattn.collectives.runtime.operator import Columns, NativeCode
from treeattn.errors import ArgumentError, BackendError

__all__ = ["MergeOperator", "NullOperator", "merge"]


def merge(into: Array, other: Array) -> None:
    """Fold `other` into `into`, in place: records [..., head_dim + 2] of one shape and type.

    Raises:
        ArgumentError: they differ in shape or type, or are not C-contiguous.
    """
    arguments.check_merge(into, other)
    MergeOperator(into.shape[-1] - partial.EXTRA, into.dtype).planned_merge(into, other)()


class MergeOperator:
    """How records of one head dimension and type merge: a `collectives.runtime.operator.Operator`."""

    def __init__(self, head_dim: int, dtype: Any = np.float32) -> None:
        """For records of `head_dim` + 2 elements of `dtype`, float32 or float64."""
        #: Elements of one record.
        self.width = head_dim + partial.EXTRA
        #: Element type of a record.
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        if self.dtype not in (np.float32, np.float64):
            raise ArgumentError(f"records are float32 or float64, not {self.dtype}")

    def planned_merge(self, into: Array, other: Array) -> Callable[[], object]:
        """A call that folds `other` into `into`, in place, without checks: C-contiguous [records, width],
        which never move."""
        compiled = kernels.loaded()[0]
        if compiled is None or self.dtype != np.float32:
            return functools.partial(partial.merge, into, other)
        return arguments.planned(compiled.merge_partials, into, other, into.size // self.width, self.width)

    def columns(self, records: Array) -> Columns:
        """Maximum, denominator and numerator of records [records, width], as views."""
        return Columns(records[:, 0], records[:, 1], records[:, partial.EXTRA :])

    def planned_maxima(self, records: Array, maxima: Array) -> Callable[[], object]:
        """The maxima of records [records, width] into `maxima` [records], NaN as +inf."""
        return functools.partial(np.fmin, records[:, 0], np.inf, out=maxima)

    def planned_rescale(
        self, records: Array, maxima: Array, denominators: Array, numerators: Array
    ) -> Callable[[], object]:
        """A call of `rescale_records` for arrays that never move; compiled where there is a compiler, to the
        same bits."""
        compiled = kernels.loaded()[0]
        if compiled is None or self.dtype != np.float32:
            return functools.partial(rescale_records, records, maxima, denominators, numerators)
        strided = ((array, array.strides[0] // array.itemsize) for array in (denominators, numerators))
        given = (records, maxima, *itertools.chain(*strided), *records.shape)
        return arguments.planned(compiled.rescale_records, *given)

    def native_code(self) -> NativeCode:
        """The compiled merge and the step that calls it.

        Raises:
            BackendError: there is no compiled merge for these records (float64, or no compiler).
        """
        compiled, problem = kernels.loaded()
        if compiled is None or self.dtype != np.float32:
            raise BackendError(
                f"no compiled merge of {self.dtype} records ({problem or 'only float32 has one'})"
            )
        return NativeCode(_address(compiled.run_step), _address(compiled.merge_partials))

    def mpi_function(self) -> int:
        """Address of the merge as an MPI_User_function; it lives as long as the process.

        Raises:
            BackendError: there is no compiled merge for these records (float64, or no compiler).
        """
        compiled, problem = kernels.loaded()
        if compiled is None or self.dtype != np.float32:
            raise BackendError(
                f"no compiled merge of {self.dtype} records ({problem or 'only float32 has one'}), which "
                "mpi_allreduce needs: take a scheme with a schedule, such as recursive_doubling"
            )
        address: int | None = compiled.mpi_operator(ctypes.c_int64(self.width - partial.EXTRA))
        if address is None:
            raise BackendError(
                f"no compiled MPI operator for head_dim {self.width - partial.EXTRA}, only for multiples of "
                "8 up to 256 and for 512, and mpi_allreduce needs one: take a scheme with a schedule, such "
                "as recursive_doubling"
            )
        return address


class NullOperator(MergeOperator):
    """Merges nothing: what a reduction then costs is the executor and the messages."""

    def planned_merge(self, into: Array, other: Array) -> Callable[[], object]:
        """A callable that does nothing."""
        return tuple

    def native_code(self) -> NativeCode:
        """The same in C. Raises as that of `MergeOperator` does."""
        compiled = kernels.loaded()[0]
        return super().native_code()._replace(merge=_address(compiled and compiled.merge_nothing))


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0
