"""What is done with records on the processor: parts of other kernels packed, merged, finished into results.

Compiled kernels, or NumPy, to the same bits. Here is also how C functions are given arrays and one another.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from treeattn import bins, partial
from treeattn.backends.cpu import compile
from treeattn.collectives.runtime.operator import Columns, NativeCode
from treeattn.errors import ArgumentError, BackendError
from treeattn.partial import Array


class _ArrayInterface(ctypes.Structure):
    """PyArrayInterface, the C structure of NumPy's array interface protocol, up to what is read of it."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("two", "nd")),
        ("typekind", ctypes.c_char),
        *((name, ctypes.c_int) for name in ("itemsize", "flags")),
        *((name, ctypes.c_void_p) for name in ("shape", "strides", "data")),
    )


_interface = ctypes.PYFUNCTYPE(ctypes.POINTER(_ArrayInterface), ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def address(array: Array) -> int:
    """Where an array's first element lies: `array.ctypes.data` in half the time, for a decoder's step."""
    capsule = array.__array_struct__  # owns what the pointer leads to
    data: int = _interface(capsule, None).contents.data
    return data


def code_address(function: Any) -> int:
    """Where the code of a C function begins; 0 for None."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def planned(function: Callable[..., object], *given: Array | int) -> Callable[[], object]:
    """A call of a C function that takes addresses of arrays, tied to its life, and 64-bit integers."""
    call = functools.partial(
        function,
        *(ctypes.c_int64(one) if isinstance(one, int) else ctypes.c_void_p(address(one)) for one in given),
    )
    call.arrays = given  # type: ignore[attr-defined]
    return call


def check_records(records: Array) -> None:
    """Raise `ArgumentError` unless they are [batch, heads, queries, head_dim + 2], or those of
    `treeattn.bins`."""
    if records.ndim != 4 or records.shape[3] <= partial.EXTRA:
        raise ArgumentError(
            f"records have shape {records.shape}: [batch, heads, queries, head_dim + 2] is needed"
        )
    if records.dtype not in (np.float32, np.float64, np.int64) or not records.flags.c_contiguous:
        raise ArgumentError("records must be C-contiguous, float32, float64, or of treeattn.bins int64")


_NEEDED = ", which mpi_allreduce needs: take a scheme with a schedule, such as recursive_doubling"


class MergeOperator:
    """How records of one head dimension and type merge: a `collectives.runtime.operator.Operator`."""

    # The merge in C, its number among operators of MPI (kernels/cpu), and in NumPy.
    _merge, _kind, _by_numpy = "merge_partials", 0, staticmethod(partial.merge)

    def __init__(self, head_dim: int, dtype: Any = np.float32) -> None:
        """For records of `head_dim` + 2 elements of `dtype`, float32 or float64."""
        #: Elements of one record.
        self.width = head_dim + partial.EXTRA
        self._dim = head_dim
        #: Element type of a record.
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        if self.dtype not in (np.float32, np.float64):
            raise ArgumentError(f"records are float32 or float64, not {self.dtype}")

    def planned_merge(self, into: Array, other: Array) -> Callable[[], object]:
        """A call that folds `other` into `into`, in place, without checks: C-contiguous [records, width],
        which never move."""
        compiled = compile.loaded()[0]
        if compiled is None or self.dtype == np.float64:
            return functools.partial(self._by_numpy, into, other)
        merge = getattr(compiled, self._merge)
        return planned(merge, into, other, into.size // self.width, self.width)

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
        compiled = compile.loaded()[0]
        if compiled is None or self.dtype != np.float32:
            return functools.partial(rescale_records, records, maxima, denominators, numerators)
        given: list[Array | int] = [records, maxima]
        for array in (denominators, numerators):
            given += array, array.strides[0] // array.itemsize
        return planned(compiled.rescale_records, *given, *records.shape)

    def native_code(self) -> NativeCode:
        """The compiled merge and the step that calls it. Raises `BackendError` where there is none: of
        float64, or without a compiler."""
        return _native_code(self._compiled(""), self._merge)

    def mpi_function(self) -> int:
        """Address of the merge as an MPI_User_function, which lives as long as the process. Raises
        `BackendError` where there is none."""
        compiled = self._compiled(_NEEDED)
        address: int | None = compiled.mpi_operator(ctypes.c_int64(self._dim), ctypes.c_int(self._kind))
        if address is None:
            raise BackendError(
                f"no compiled MPI operator for head_dim {self._dim}, only for multiples of 8 up to "
                f"256, for those less 2 up to 126, and for 512{_NEEDED}"
            )
        return address

    def _compiled(self, why: str) -> ctypes.CDLL:
        compiled, problem = compile.loaded()
        if compiled is None or self.dtype == np.float64:
            raise BackendError(
                f"no compiled merge of {self.dtype} records ({problem or 'only float32 has one'}){why}"
            )
        return compiled


@functools.cache
def _native_code(compiled: ctypes.CDLL, merge: str) -> NativeCode:
    return NativeCode(*map(code_address, (compiled.run_step, getattr(compiled, merge))))


def planned_finish(records: Array, out: Array, lse: Array) -> Callable[[], object]:
    """A call that turns records [batch, heads, queries, head_dim + 2], or those of `treeattn.bins`, into out
    [batch, queries, heads, head_dim] and lse [batch, heads, queries], as `treeattn.partial.finish` does, to
    the bit. All C-contiguous, of one type (float32 for int64); none ever moves. Raises `ArgumentError`."""
    check_records(records)
    batch, heads, queries, width = records.shape
    whole = records.dtype == np.int64
    v_dim = (width - bins.EXTRA) // 2 if whole else width - partial.EXTRA
    dtype = np.dtype(np.float32) if whole else records.dtype
    shapes = {"out": (out, (batch, queries, heads, v_dim)), "lse": (lse, (batch, heads, queries))}
    for name, (array, shape) in shapes.items():
        if array.shape != shape or array.dtype != dtype or not array.flags.c_contiguous:
            raise ArgumentError(
                f"{name} must be C-contiguous {dtype} of shape {shape}, not {array.dtype} {array.shape}"
            )
    compiled = compile.loaded()[0]
    if compiled is None or records.dtype == np.float64:
        return functools.partial(bins.finish if whole else partial.finish, records, out, lse)
    finish = compiled.finish_bins if whole else compiled.finish
    return planned(finish, records, out, lse, *records.shape)


def planned_pack(records: Array, factor: float) -> Callable[[Array, Array], None]:
    """A call with out [.., head_dim] and lse [..] that writes records [.., head_dim + 2].

    The record of a part is (m, d, d * out): m is lse * factor, `factor` the natural logarithm of its base, in
    the type of records, and d = exp(lse * factor - m), so that the rounding of m costs no weight its digits.
    An lse that is infinite or NaN marks a part that saw nothing, whatever its out holds. uint16 holds bits
    of bfloat16.
    """
    maxima, denominators, numerators = records[..., 0], records[..., 1], records[..., partial.EXTRA :]
    nothing = partial.identity((), numerators.shape[-1], records.dtype)

    def pack(out: Array, lse: Array) -> None:
        with np.errstate(all="ignore"):
            natural = np.multiply(lse, factor, dtype=np.float64)
            maxima[...] = natural
            denominators[...] = _exponential_of_rest(natural - maxima)
            numerators[...] = out.view(ml_dtypes.bfloat16) if out.dtype == np.uint16 else out
            numerators[...] *= denominators[..., np.newaxis]
        seen = np.isfinite(lse)  # as it came: what its records' type cannot hold must not pass for nothing
        if not seen.all():
            records[~seen] = nothing

    return pack


def _exponential_of_rest(rest: Array) -> Array:
    """exp of what the rounding of a maximum left, by basic operations. More than 1 is left of none below 2^24
    that a weight could still be told of."""
    small = np.clip(rest, -1, 1).astype(np.float32)
    exponential = partial.exponential(-np.abs(small))
    return np.where(small > 0, np.float32(1) / exponential, exponential)


def planned_scale(lse: Array, factor: float) -> Callable[[], object]:
    """A call that multiplies lse by `factor`, in place."""
    return lambda: np.multiply(lse, factor, out=lse, dtype=np.float64, casting="same_kind")


def rescale_records(records: Array, shared: Array, denominators: Array, numerators: Array) -> None:
    """Write the sums of `records` over the maximum `shared`, which is at least their own.

    The middle of a reduction by built-in operators: where only MAX and SUM are at hand, the maxima are
    reduced first; then each rank rescales its records to the common maximum, and denominators and numerators
    are plain sums (Shyam et al., arXiv 2408.04093, Algorithm 3).

    records: [count, head_dim + 2], float32 or float64. shared: [count], the largest maximum of all ranks, NaN
    aside. Written are denominators [count] and numerators [count, head_dim], rows of any stride. A record of
    nothing gives zeros, also where no rank saw anything; a maximum of NaN gives NaN.
    """
    own = records[:, 0]
    with np.errstate(all="ignore"):
        lower = np.where(own == shared, 0, own - shared)
        factor = np.exp(lower) if records.dtype == np.float64 else partial.exponential(lower)
        factor = np.where(np.isnan(own) | np.isnan(shared), np.nan, factor).astype(records.dtype, copy=False)
        np.multiply(records[:, 1], factor, out=denominators)
        np.multiply(records[:, partial.EXTRA :], factor[:, None], out=numerators)
    empty = own == -np.inf
    denominators[empty] = 0
    numerators[empty] = 0
