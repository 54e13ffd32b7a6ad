"""Reports of what was found: tables and lines for a reader, JSON for a program, progress meanwhile."""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TextIO, TypeVar

import msgspec
from msgspec import structs

from treeattn.mpi import launch

if TYPE_CHECKING:
    from rich.console import Console  # imported where something is shown: it loads as long as click

Row = TypeVar("Row")

#: Explains a column of `identical`.
LEGEND = "identical bits (proved): by the schedule, on all ranks; (measured): in this run"


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """A column of a table, made of rows that are mappings or objects.

    Parameters
    ----------
    heading : str
        Also the key or attribute of a row that is shown, unless `value` says otherwise.
    value : str or callable, optional
        Key or attribute, or a function of the row. None in a row is shown as a dash.
    form : str or callable, optional
        A format specification such as ``",.0f"``, or a function of the value.
    words : bool
        Aligned to the left, as numbers are not.
    wide : bool
        Shown only where every column is asked for.
    """

    heading: str
    value: str | Callable[[Row], object] | None = None
    form: str | Callable[..., str] = ""
    words: bool = False
    wide: bool = False

    def cell(self, row: Row) -> str:
        key = self.heading if self.value is None else self.value
        if callable(key):
            value = key(row)
        elif isinstance(row, Mapping):
            value = row[key]
        else:
            value = getattr(row, key)
        if value is None:
            return "-"
        return plain(self.form(value) if callable(self.form) else format(value, self.form))


def plain(text: str) -> str:
    """Text that may come from a file, for a screen, which would obey its control characters."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(one if one.isprintable() or one == "\n" else repr(one)[1:-1] for one in text)


@dataclass(slots=True)
class Report:
    """Facts for a program, what JSON holds, and tables and lines that show them to a reader."""

    facts: Mapping[str, object] | Sequence[object]
    _parts: list[Callable[[Console, bool], None]] = field(default_factory=list)

    def line(self, text: str = "", style: str | None = None) -> None:
        """Add a line, broken where it is longer than the screen is wide."""
        self._parts.append(lambda screen, wide: screen.print(plain(text), style=style))

    def text(self, text: str) -> None:
        """Add lines as they are, such as a drawing."""
        self._parts.append(lambda screen, wide: screen.print(plain(text), soft_wrap=True))

    def note(self, text: object) -> None:
        """Add a remark, unless it is empty or None."""
        if text:
            self.line(f"note: {text}", style="dim")

    def table(
        self,
        rows: Iterable[Row],
        columns: Iterable[Column[Row]],
        style: Callable[[Row], str] = lambda _: "",
    ) -> None:
        """Add a table with a line for each of `rows`, in the style that `style` has for it."""
        kept, every = list(rows), list(columns)

        def draw(screen: Console, wide: bool) -> None:
            from rich.table import Table

            shown = [column for column in every if wide or not column.wide]
            if not shown:
                return
            table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
            for column in shown:
                table.add_column(column.heading, justify="left" if column.words else "right", overflow="fold")
            for row in kept:
                table.add_row(*(column.cell(row) for column in shown), style=style(row))
            screen.print(table)

        self._parts.append(draw)

    def show(self, wide: bool = False, file: TextIO | None = None) -> None:
        """Print everything: as wide as a terminal, else in 80 columns; `wide`: every column, unbroken."""
        from rich.console import Console

        terminal = (file or sys.stdout).isatty() and not launch.by_launcher()
        width = 1000 if wide else None if terminal else 80
        screen = Console(
            file=file, width=width, markup=False, emoji=False, highlight=False,
            color_system="auto" if terminal else None,
        )  # fmt: skip
        for part in self._parts:
            part(screen, wide)

    def json(self) -> bytes:
        return as_json(self.facts)


class Progress:
    """A line on stderr now and then, since under mpiexec there is no terminal for a bar.

    As a context manager it repeats the last text while nothing else is said: of one long computation, too.
    """

    def __init__(self, shown: bool = True, first: float = 2.0, every: float = 10.0) -> None:
        """shown: on rank 0. Seconds until the first line, and from each to the next."""
        self._next, self._every = time.monotonic() + first if shown else math.inf, every
        self._text, self._over = "", threading.Event()

    def __call__(self, text: str) -> None:
        """Print the text, unless it is too early."""
        self._text = text
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + self._every
            print(text, file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        if self._next < math.inf:
            threading.Thread(target=self._repeat, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _repeat(self) -> None:
        while not self._over.wait(max(0.0, self._next - time.monotonic())):
            self(self._text)


def as_json(facts: object) -> bytes:
    """Encode strict JSON, one fact per line; numbers that JSON lacks become strings ("inf", "nan")."""
    text = json.dumps(_finite(facts), indent=1, allow_nan=False)
    return (text + "\n").encode()


def _finite(value: object) -> object:
    if isinstance(value, msgspec.Struct):
        value = structs.asdict(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def microseconds(value: float) -> str:
    """Format a time in microseconds."""
    return f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


def ratio(value: float) -> str:
    """Format a ratio: two decimals, below 0.1 two digits."""
    return f"{value:.2f}" if value >= 0.1 else f"{value:#.2g}"


def between(low: float | None, high: float | None, form: Callable[[float], str]) -> str | None:
    """Format an interval, where there is one."""
    return None if low is None or high is None else f"{form(low)} to {form(high)}"


def count(value: float | str) -> str:
    """Format how many there are; words stay as they are."""
    return value if isinstance(value, str) else f"{value:,.0f}"


def identical(determinism: str, same: bool | None = True) -> str:
    """Say how it is known that all ranks end with the same bits; a dash where each has other heads."""
    if same is None:
        return "-"
    return ("measured" if determinism == "measured" else "proved") if same else "NO"
