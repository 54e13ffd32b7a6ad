"""What a figure shows, as data: drawn by `treeattn.study.figures.draw`, written out by ``--json``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from treeattn.study.statistics import Statistics

__all__ = ["Chart", "Lines", "Panel", "Point", "Rows", "Series", "interval"]


class Point(NamedTuple):
    """One mark. x: the place on a `Lines` axis, the row of `Rows`. low, high: interval, None without one."""

    x: float
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Series:
    """Marks that belong together. label: what the legend says."""

    label: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Lines:
    """Values over a quantity, one line per series.

    name: of the file, without its ending; the label of a series is a scheme, which has a style. joined: with
    lines between marks. intervals: a mark without one is hollow. ticks: "tokens" writes 65536 as 64Ki.
    reference: a line across at this value, with its meaning; "diagonal": where both axes agree. notes: what
    stands below.
    """

    name: str
    title: str
    case: str
    notes: tuple[str, ...]
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    x_log: bool = True
    joined: bool = True
    intervals: bool = True
    ticks: Literal["tokens", "plain"] = "plain"
    reference: tuple[float, str] | Literal["diagonal"] | None = None


@dataclass(frozen=True, slots=True)
class Panel:
    """One axis of `Rows`. reference: as for `Lines`. absent: row -> why it has no mark."""

    x_label: str
    series: tuple[Series, ...]
    log: bool = True
    reference: tuple[float, str] | None = None
    absent: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Rows:
    """Values by name, one row each, from the top: a panel or several beside each other.

    styles: per row, whose colour it has. mark: bars start at the axis, dots have intervals,
    and without one are hollow.
    """

    name: str
    title: str
    case: str
    notes: tuple[str, ...]
    labels: tuple[str, ...]
    styles: tuple[str, ...]
    panels: tuple[Panel, ...]
    mark: Literal["bars", "dots"]


Chart = Lines | Rows


def interval(x: float, time: Statistics) -> Point:
    """The median of a series of times with its interval."""
    return Point(x, time.median, time.low, time.high)
