"""Stand-ins for CuPy's arrays and for the functions on them, with NumPy inside where nobody looks.

They refuse what CuPy refuses: NumPy's functions on an array of the device, an array of the host among those
of the device, a copy to the host that nobody asked for, and whatever CuPy is not known to have
(`tests/unit/backends/cupy_signatures.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.unit.backends.cupy_signatures import SIGNATURES, signature


class DeviceArray:
    """An array of the device. It has what `SIGNATURES` lists of ``cupy.ndarray``, operators and indices."""

    __slots__ = ("_inside",)
    __array_ufunc__ = None  # NumPy leaves operators of mixed operands to this class
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, inside: Any) -> None:
        self._inside = np.asarray(inside)

    def __array__(self, *given: Any, **options: Any) -> Any:
        raise TypeError("Implicit conversion of an array of the device to one of the host")

    def __bool__(self) -> bool:
        raise TypeError("a look at an array of the device makes the host wait")

    def __int__(self) -> int:
        return int(self._inside)

    def get(self) -> Any:
        """A copy for the host."""
        return self._inside.copy()

    def __len__(self) -> int:
        return len(self._inside)

    def __iter__(self) -> Iterator[DeviceArray]:
        return (DeviceArray(row) for row in self._inside)

    def __getitem__(self, index: Any) -> DeviceArray:
        return DeviceArray(self._inside[_index(index)])

    def __setitem__(self, index: Any, value: Any) -> None:
        self._inside[_index(index)] = on_host(value)


def let_mpi_take_them() -> None:
    """As an MPI library does that takes GPU buffers; others would read the address as one of the host."""
    described = property(lambda self: {**self._inside.__array_interface__, "version": 3})
    DeviceArray.__cuda_array_interface__ = described  # type: ignore[attr-defined]


def on_host(value: Any) -> Any:
    """What NumPy sees of an operand. An array of the host is none, nor are several in a sequence."""
    if isinstance(value, DeviceArray):
        return value._inside
    if isinstance(value, np.ndarray):
        raise TypeError("an array of the host among those of the device")
    if isinstance(value, list | tuple):
        return type(value)(map(on_host, value))
    return value


def on_device(result: Any) -> Any:
    """What NumPy made, as the device's."""
    if isinstance(result, list | tuple):
        return type(result)(map(on_device, result))
    return DeviceArray(result) if isinstance(result, np.ndarray | np.generic) else result


def _index(index: Any) -> Any:
    return tuple(map(on_host, index)) if isinstance(index, tuple) else on_host(index)


def _bound(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """NumPy's function, for what CuPy's takes too."""
    declared = signature(name)

    def call(*given: Any, **options: Any) -> Any:
        declared.bind(*given, **options)
        return on_device(function(*map(on_host, given), **{k: on_host(v) for k, v in options.items()}))

    return call


def _method(name: str) -> Callable[..., Any]:
    def call(self: DeviceArray, *given: Any, **options: Any) -> Any:
        return _bound(f"ndarray.{name}", getattr(self._inside, name))(*given, **options)

    return call


def _property(name: str) -> property:
    return property(lambda self: on_device(getattr(self._inside, name)))


def _binary(function: Callable[[Any, Any], Any], swapped: bool = False) -> Callable[..., Any]:
    def call(self: DeviceArray, other: Any) -> Any:
        pair = (on_host(other), self._inside) if swapped else (self._inside, on_host(other))
        return on_device(function(*pair))

    return call


def _in_place(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def call(self: DeviceArray, other: Any) -> DeviceArray:
        function(self._inside, on_host(other))
        return self

    return call


def _equip() -> None:
    """Operators, and what the list has of an array."""
    for name in ("add", "sub", "mul", "truediv", "matmul", "mod", "floordiv", "and_", "or_"):
        plain = name.strip("_")
        setattr(DeviceArray, f"__{plain}__", _binary(getattr(operator, name)))
        setattr(DeviceArray, f"__r{plain}__", _binary(getattr(operator, name), swapped=True))
        if name != "matmul":
            setattr(DeviceArray, f"__i{plain}__", _in_place(getattr(operator, f"i{plain}")))
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        setattr(DeviceArray, f"__{name}__", _binary(getattr(operator, name)))
    DeviceArray.__neg__ = lambda self: on_device(-self._inside)  # type: ignore[attr-defined]
    for dotted, parameters in SIGNATURES.items():
        kind, _, name = dotted.partition(".")
        if kind == "ndarray" and name and name not in vars(DeviceArray):
            made = _property(name) if parameters is None else _method(name)
            setattr(DeviceArray, name, made)


def _functions() -> SimpleNamespace:
    """What the list has of functions on arrays: those that NumPy has under the same name."""
    found: dict[str, Any] = {"ndarray": DeviceArray}
    found |= {kind.__name__: kind for kind in (np.int64, np.uint32, np.uint8)}
    for name, parameters in SIGNATURES.items():
        function = getattr(np, name, None)
        if "." not in name and parameters is not None and function is not None:
            found[name] = _bound(name, function)
    # The one that takes arrays of the host, too, and gets a type that NumPy need not know.
    found["asarray"] = lambda a, **options: on_device(np.asarray(getattr(a, "_inside", a), **options))
    return SimpleNamespace(**found)


_equip()
#: In place of the module ``cupy``.
namespace = _functions()
