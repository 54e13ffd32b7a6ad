"""What a figure shows, as data: drawn by `treeattn.study.figures.draw`, written out by ``--json``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from treeattn.study.statistics import Statistics


class Point(NamedTuple):
    """One mark. x: the place on a `Lines` axis, the row of `Rows`. low, high: interval, None without one;
    x_low, x_high: of the place, where that is measured, too."""

    x: float
    value: float
    low: float | None = None
    high: float | None = None
    x_low: float | None = None
    x_high: float | None = None


@dataclass(frozen=True, slots=True)
class Series:
    """Marks that belong together, and what they are called: in `Lines` by a scheme."""

    label: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Chart:
    """What stands around a picture. name: of the file, without its ending; notes: what stands below."""

    name: str
    title: str
    case: str
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Lines(Chart):
    """Values over a quantity: small multiples, one for each series with the others in grey behind it.

    intervals: a mark without one is hollow. ticks: "tokens" writes 65536 as 64Ki. diagonal: a line where
    both axes agree. left_out: what the results have and the figure has not, each with the reason.
    """

    x_label: str
    y_label: str
    series: tuple[Series, ...]
    x_log: bool = True
    intervals: bool = True
    ticks: Literal["tokens", "plain"] = "plain"
    reference: float | None = None
    diagonal: bool = False
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Panel:
    """One axis of `Rows`. reference: a line across at this value. absent: row -> why it has no mark."""

    x_label: str
    series: tuple[Series, ...]
    title: str = ""
    log: bool = True
    reference: float | None = None
    absent: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Rows(Chart):
    """Values by name, one row each, from the top: a panel or several beside each other. A scheme has its
    colour. exact: counts, written beside their marks; marks of others are hollow without an interval."""

    labels: tuple[str, ...]
    panels: tuple[Panel, ...]
    exact: bool = False


@dataclass(frozen=True, slots=True)
class Curve:
    """A panel of `Curves`: points in ascending order of x, with a band where they have intervals.

    mark: a point that stands out. line: (x, y, slope) of a straight line, drawn within the curve's limits.
    """

    label: str
    points: tuple[Point, ...]
    mark: Point | None = None
    line: tuple[float, float, float] | None = None


@dataclass(frozen=True, slots=True)
class Curves(Chart):
    """Computed functions of one quantity, beside each other."""

    x_label: str
    panels: tuple[Curve, ...]


def interval(x: float, time: Statistics) -> Point:
    """The median of a series of times with its interval."""
    return Point(x, time.median, time.low, time.high)
