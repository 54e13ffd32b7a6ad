"""What all commands share: how numbers are read and written, how wide a table is, how far the work is."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.table import Table

from treeattn.errors import ArgumentError

__all__ = [
    "LEGEND", "WIDE", "Columns", "Lines", "choose", "console", "count", "durations", "identical",
    "magnitude", "microseconds", "number", "numbers", "table",
]  # fmt: skip

R = TypeVar("R")
Cell = Callable[[R], str]
Columns = Mapping[str, Cell[R]]

#: Stands below a table that has a column of `identical`.
LEGEND = "identical bits (proved): by the schedule, on all ranks; (measured): in this run"
WIDE = click.option("--wide", is_flag=True, help="Every column, however wide the table becomes.")

_UNITS = {"Ki": 1024, "Mi": 1024**2, "k": 1000, "M": 1000**2}
_MICROSECONDS = {"us": 1.0, "µs": 1.0, "ms": 1e3, "s": 1e6}


def number(option: str, text: str) -> int:
    """A whole number; k = 1000, Ki = 1024, M and Mi likewise. Raises `ArgumentError`."""
    times = 1
    for unit, factor in _UNITS.items():
        if text.endswith(unit):
            text, times = text.removesuffix(unit), factor
            break
    if not text.strip().isdecimal() or len(text) > 18:
        raise ArgumentError(f"{option} {text!r:.40}: give a whole number, such as 65536 or 64Ki")
    return int(text) * times


def numbers(option: str, text: str, low: int = 1) -> list[int]:
    """Whole numbers separated by commas, each once and at least `low`. Raises `ArgumentError`."""
    values = [number(option, part) for part in text.split(",")]
    if min(values) < low:
        raise ArgumentError(f"{option} {text}: {min(values)} is too small, {low} is the least")
    return list(dict.fromkeys(values))


def choose(option: str, text: str, known: Iterable[str]) -> tuple[str, ...]:
    """The names in a list, each once. Raises `ArgumentError` for one that is not `known`."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in known:
            raise ArgumentError(f"{option} {name!r} is unknown: choose from {', '.join(known)}")
    return names


def durations(option: str, text: str) -> list[float]:
    """Times in microseconds, from 0, 100us, 1ms, separated by commas. Raises `ArgumentError`."""
    return list(dict.fromkeys(_duration(option, part.strip()) for part in text.split(",")))


def _duration(option: str, text: str) -> float:
    if text == "0":
        return 0.0
    for unit, factor in _MICROSECONDS.items():
        if text.endswith(unit):
            try:
                value = float(text.removesuffix(unit)) * factor
            except ValueError:
                break
            if 0 <= value < 1e9:
                return value
    raise ArgumentError(f"{option} {text!r}: give 0 or a time with its unit, such as 100us or 1ms")


def microseconds(value: float) -> str:
    """A time in a table."""
    return f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


def count(value: Any) -> str:
    """How many, in a table; words stay as they are, and nothing is a dash."""
    return "-" if value is None else value if isinstance(value, str) else f"{value:,.0f}"


def magnitude(value: float | None) -> str:
    """An error or its bound, in a table."""
    return "-" if value is None else f"{value:.1e}"


def identical(determinism: str, same: bool | None = True) -> str:
    """How it is known that all ranks end with the same bits; a dash where each has other heads."""
    if same is None:
        return "-"
    return ("measured" if determinism == "measured" else "proved") if same else "NO"


def console(wide: bool = False) -> Console:
    """Where tables are printed: as wide as the terminal, and 80 columns in files, pipes and under mpiexec."""
    width = 1000 if wide else None if sys.stdout.isatty() else 80
    return Console(width=width, markup=False, highlight=False)


def table(
    screen: Console, columns: Columns[R], rows: Iterable[R], words: int = 1, style: Cell[R] | None = None
) -> None:
    """Print a row for each of `rows`, its cells made by `columns`: heading -> what stands there. The first
    `words` columns hold words, the others numbers."""
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, heading in enumerate(columns):
        shown.add_column(heading, justify="left" if index < words else "right", overflow="fold")
    for row in rows:
        shown.add_row(*(cell(row) for cell in columns.values()), style=style(row) if style else None)
    screen.print(shown)


class Lines:
    """Progress: a line on stderr now and then, since under mpiexec there is no terminal for a bar."""

    def __init__(self, shown: bool = True, first: float = 3.0, every: float = 10.0) -> None:
        """shown: on rank 0. Seconds until the first line, and from each to the next."""
        self._next, self._every = time.monotonic() + first if shown else math.inf, every

    def __call__(self, text: str) -> None:
        """Print the text, unless it is too early."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + self._every
            print(text, file=sys.stderr, flush=True)
