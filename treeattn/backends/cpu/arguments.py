"""Addresses and checks of the arrays that a backend on the processor is given, and how new ones are bound."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from treeattn import partial
from treeattn.attention.shape import check_shapes
from treeattn.errors import ArgumentError
from treeattn.partial import Array

# enum element_type of kernels/cpu/simd.h. uint16 stands for the bits of bfloat16.
_ELEMENT_TYPES = {
    np.dtype(np.float32): 0,
    np.dtype(np.float16): 1,
    np.dtype(ml_dtypes.bfloat16): 2,
    np.dtype(np.uint16): 2,
    np.dtype(ml_dtypes.float8_e4m3fn): 3,
    np.dtype(ml_dtypes.float8_e5m2): 4,
}
_CACHES_ONLY = (3, 4)


class _ArrayInterface(ctypes.Structure):
    """PyArrayInterface, the C structure of NumPy's array interface protocol."""

    _fields_ = [
        ("two", ctypes.c_int),
        ("nd", ctypes.c_int),
        ("typekind", ctypes.c_char),
        ("itemsize", ctypes.c_int),
        ("flags", ctypes.c_int),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("data", ctypes.c_void_p),
    ]


_interface = ctypes.PYFUNCTYPE(ctypes.POINTER(_ArrayInterface), ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def address(array: Array) -> int:
    """Where an array's first element lies: `array.ctypes.data` in half the time, for a decoder's step."""
    capsule = array.__array_struct__  # owns what the pointer leads to
    data: int = _interface(capsule, None).contents.data
    return data


def check_records(records: Array) -> None:
    if records.ndim != 4 or records.shape[3] <= partial.EXTRA:
        raise ArgumentError(
            f"records have shape {records.shape}: [batch, heads, queries, head_dim + 2] is needed"
        )
    if records.dtype not in (np.float32, np.float64, np.int64) or not records.flags.c_contiguous:
        raise ArgumentError("records must be C-contiguous, float32, float64, or of treeattn.bins int64")


def check_output(name: str, array: Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    if array.shape != shape or array.dtype != dtype or not array.flags.c_contiguous:
        raise ArgumentError(
            f"{name} must be C-contiguous {dtype} of shape {shape}, not {array.dtype} {array.shape}"
        )


def check_lengths(lengths: Array | None, tokens: int) -> None:
    for b, length in enumerate(() if lengths is None else lengths):
        if not 0 <= length <= tokens:
            raise ArgumentError(f"lengths[{b}] = {length} is not in 0..{tokens}, the tokens of this shard")


def check_inputs(
    q: Array, k: Array, v: Array, records: Array, bits: np.dtype[Any] | None = None, *, paged: bool = False
) -> tuple[int, int]:
    """Element types of q and of k, v for the kernel; ArgumentError if anything does not fit. bits: what k
    and v of uint8 carry. paged: k and v are [pages, page_size, ..]."""
    check_shapes(q, k, v, records, paged=paged)
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.strides[3] != array.itemsize and array.shape[3] > 1 and array.size:
            raise ArgumentError(f"the last axis of {name} must be contiguous")
    if records.dtype == np.float64:
        return 0, 0
    try:
        types = _ELEMENT_TYPES[q.dtype], _ELEMENT_TYPES[bits if bits and k.dtype == np.uint8 else k.dtype]
    except KeyError:
        types = _CACHES_ONLY[0], 0
    if types[0] in _CACHES_ONLY:
        raise ArgumentError(
            f"q {q.dtype}, k {k.dtype}: with float32 records they are float32, float16 or bfloat16, and k "
            "may be float8_e4m3fn or float8_e5m2"
        )
    return types


def planned(function: Callable[..., object], *given: Array | int) -> Callable[[], object]:
    """A call of a C function that takes addresses of arrays, tied to its life, and 64-bit integers."""
    call = functools.partial(
        function,
        *(ctypes.c_int64(one) if isinstance(one, int) else ctypes.c_void_p(address(one)) for one in given),
    )
    call.arrays = given  # type: ignore[attr-defined]
    return call


class Binding(ctypes.Structure):
    """struct binding of kernels/cpu/bind_arrays.c: new arrays in the place of the last ones, without Python
    code for each. workspace: bytes that `attention` has."""

    _fields_ = (
        ("item", ctypes.c_void_p),
        ("attribute", ctypes.c_void_p),
        ("pointer", ctypes.c_void_p),
        ("release", ctypes.c_void_p),
        ("name", ctypes.py_object),
        ("none", ctypes.py_object),
        ("attention", ctypes.c_void_p),
        ("workspace", ctypes.c_int64),
    )


def planned_binding(kernels: ctypes.CDLL, binding: Binding) -> Callable[[tuple[Any, ...]], int]:
    """Called with (q, k, v, lengths), binds them and gives 0 where that is so easy; else changes nothing."""
    python = ctypes.pythonapi
    functions = {"item": python.PyTuple_GetItem, "attribute": python.PyObject_GetAttr}
    functions |= {"pointer": python.PyCapsule_GetPointer, "release": python.Py_DecRef}
    for name, function in functions.items():
        setattr(binding, name, code_address(function))
    binding.name, binding.none = "__array_struct__", None
    # The interpreter's lock is kept: its objects are asked.
    prototype = ctypes.PYFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.py_object)
    call = prototype(code_address(kernels.bind_arrays))
    return functools.partial(call, ctypes.c_void_p(ctypes.addressof(binding)))


def code_address(function: Any) -> int:
    """Where the code of a C function begins; 0 for None."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0
