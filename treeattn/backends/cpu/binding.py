"""New arrays in the place of the last ones, without Python code for each: kernels/cpu/bind_arrays.c."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

__all__ = ["Binding", "planned_binding"]


class Binding(ctypes.Structure):
    """struct binding of kernels/cpu/bind_arrays.c. workspace: bytes that `attention` has."""

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
    binding.item, binding.attribute = _address(python.PyTuple_GetItem), _address(python.PyObject_GetAttr)
    binding.pointer, binding.release = _address(python.PyCapsule_GetPointer), _address(python.Py_DecRef)
    binding.name, binding.none = "__array_struct__", None
    # The interpreter's lock is kept: its objects are asked.
    prototype = ctypes.PYFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.py_object)
    call = prototype(_address(kernels.bind_arrays))
    return functools.partial(call, ctypes.c_void_p(ctypes.addressof(binding)))


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0
