"""A rank's dump as numbers to reckon with, and what is said of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from treeattn.errors import ArgumentError
from treeattn.partial import Array

#: Natural logarithm of a base, and which one it is mistaken for.
LOG = {"e": 1.0, "2": math.log(2)}
OTHER = {"e": "2", "2": "e"}

# What kernels of a type may be off by, relative to the largest |out|.
_TOLERANCES = {"float64": 1e-9, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, or (fault=False) that is worth knowing.

    kind: "wrong base", "counted twice", "left out", "not empty", "differs", "not a number", "unexplained".
    ranks: those that it is about. text: one line. numbers: the evidence.
    """

    kind: str
    ranks: tuple[int, ...]
    text: str
    numbers: dict[str, Any] = field(default_factory=dict)
    fault: bool = True


class Part(NamedTuple):
    """out [heads, head_dim] and natural lse [heads] in float64, whatever axes the heads had."""

    out: Array
    lse: Array
    seen: Array
    dtype: str
    shape: tuple[int, ...]

    def at(self, head: int) -> list[int]:
        """Where a head lies in lse."""
        return [int(index) for index in np.unravel_index(head, self.shape)]


def base_name(base: str | int) -> str:
    """ "e" or "2". Raises `ArgumentError`."""
    if str(base) not in LOG:
        raise ArgumentError(f"base {base!r} is unknown: use 'e' or 2")
    return str(base)


def read_part(whose: str, given: Mapping[str, Array], base: str) -> Part:
    """The ``out`` and ``lse`` of a dump. Raises `ArgumentError`."""
    out, lse = paired(whose, given)
    natural = lse.astype(np.float64).ravel() * LOG[base]
    flat = out.astype(np.float64).reshape(-1, out.shape[-1])
    return Part(flat, natural, np.isfinite(natural), out.dtype.name, lse.shape)


def paired(whose: str, given: Mapping[str, Array]) -> tuple[Array, Array]:
    """out [.., head_dim] and lse [..], their axes in one order. Raises `ArgumentError`."""
    for name in ("out", "lse"):
        if name not in given:
            raise ArgumentError(f"{whose}: no {name!r}, only {', '.join(sorted(given)) or 'nothing'}")
        check_type(whose, name, given[name])
    out, lse = given["out"], given["lse"]
    if lse.ndim > 1 and lse.shape != out.shape[:-1]:
        lse = np.swapaxes(lse, -1, -2)
    if out.ndim == 0 or out.shape[-1] == 0 or lse.shape != out.shape[:-1]:
        raise ArgumentError(
            f"{whose}: out has shape {list(out.shape)} and lse {list(given['lse'].shape)}: out is "
            "[.., head_dim], lse [..]"
        )
    return out, lse


def check_type(whose: str, name: str, array: Array) -> None:
    """Raise `ArgumentError` for what is not of a type that kernels write."""
    if array.dtype.name not in _TOLERANCES:
        raise ArgumentError(f"{whose}: {name} is {array.dtype}: one of {', '.join(_TOLERANCES)} is needed")


def tolerance(*dtypes: str) -> float:
    """What results of these types may be off by, relative to the largest |out|."""
    return max(_TOLERANCES[name] for name in dtypes)


def largest(parts: list[Part]) -> float:
    """The largest |out| of what was seen; 1 where there is none."""
    sizes = (np.abs(part.out[part.seen]) for part in parts)
    return max(float(np.where(np.isfinite(size), size, 0).max(initial=0.0)) for size in sizes) or 1.0
