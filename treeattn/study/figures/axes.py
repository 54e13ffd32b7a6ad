"""Ticks in plain numbers, marks with their intervals, and long names in several lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from treeattn.study.figures.chart import Point
from treeattn.study.figures.style import INK, PAPER

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

_FEWEST = 3  # ticks that a scale is read by
_CLOSE = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)


def brief(value: float) -> str:
    """65536 as 64Ki, 80000 as 80k, others in full."""
    for unit, size in (("Mi", 1 << 20), ("Ki", 1 << 10), ("M", 10**6), ("k", 10**3)):
        if value >= size and value % size == 0:
            return f"{value / size:g}{unit}"
    return plain(value)


def plain(value: float) -> str:
    """With thousands apart, and three digits of smaller numbers."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def value_axis(axis: Axis, log: bool, values: Sequence[float], room: int) -> None:
    """A scale for `values` with at most about `room` ticks and at least three: on logarithmic ones at 1, 2
    and 5, at 1 and 3, or at powers of ten; closer where those are too few. Where there are zeros, the axis
    is linear below the smallest other value."""
    from matplotlib import ticker

    positive = [value for value in values if value > 0] or [1.0]
    low, high = min(positive), max(positive)
    set_scale = axis.axes.set_xscale if axis is axis.axes.xaxis else axis.axes.set_yscale
    if log and len(positive) < len(values):
        least = 10.0 ** math.floor(math.log10(low))
        set_scale("symlog", linthresh=least, linscale=0.4)
        axis.set_major_locator(ticker.SymmetricalLogLocator(base=10, linthresh=least))
    elif log:
        set_scale("log")
        decades = math.log10(high / low)
        choices = [(1.0, 2.0, 5.0), (1.0, 3.0), (1.0,)]
        steps = next((steps for steps in choices if decades * len(steps) <= room - 1), (1.0,))
        finer = [s for s in (steps, (1.0, 3.0), (1.0, 2.0, 5.0), _CLOSE) if _ticks(s, low, high) >= _FEWEST]
        if finer:
            axis.set_major_locator(ticker.LogLocator(subs=finer[0], numticks=max(room, _FEWEST) + 1))
        else:
            axis.set_major_locator(ticker.MaxNLocator(room, min_n_ticks=_FEWEST))
        axis.set_minor_formatter(ticker.NullFormatter())
    else:
        axis.set_major_locator(ticker.MaxNLocator(room))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: _short(value)))


def _ticks(steps: Sequence[float], low: float, high: float) -> int:
    """How many of the steps of each decade lie from low to high."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return sum(low <= step * 10.0**exponent <= high for exponent in exponents for step in steps)


def _short(value: float) -> str:
    """10000 as 10k: ticks of logarithmic axes are round."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if value >= size and (value >= 10_000 or value % size == 0):
            return f"{value / size:,g}{unit}"
    return plain(value)


def place_ticks(axes: Axes, places: Sequence[float], tokens: bool, room: int) -> None:
    """Ticks of a horizontal axis where there are points, at most `room` of them."""
    from matplotlib import ticker

    shown = places[:: math.ceil(len(places) / room)]
    axes.xaxis.set_major_locator(ticker.FixedLocator(list(shown)))
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    write = brief if tokens else plain
    axes.xaxis.set_major_formatter(ticker.FixedFormatter([write(place) for place in shown]))


def draw_mark(
    axes: Axes,
    at: tuple[float, float],
    point: Point,
    look: tuple[str, str],
    full: bool,
    upright: bool = False,
) -> None:
    """A mark, hollow unless it is `full` or has an interval, which is drawn across or `upright`."""
    colour, marker = look
    face = colour if full or point.low is not None else PAPER
    axes.plot(*at, marker, color=colour, markerfacecolor=face, zorder=3, label=f"{point.value:g}")
    if point.low is not None and point.high is not None:
        draw = axes.vlines if upright else axes.hlines
        draw(at[not upright], point.low, point.high, colors=colour, linewidth=1.2)
    if point.x_low is not None and point.x_high is not None:
        axes.hlines(at[1], point.x_low, point.x_high, colors=colour, linewidth=1.2)


def reference_line(axes: Axes, value: float | None, upright: bool) -> None:
    """A thin line across all of the axes, at a value of either axis."""
    if value is not None:
        (axes.axvline if upright else axes.axhline)(value, color=INK, linewidth=0.8, zorder=1)


def wrapped(name: str, width: int = 34) -> str:
    """A name broken after colons and commas where it is longer than `width` characters."""
    lines, line = [], ""
    for part in name.replace(":", ":\0").replace("(", "(\0").split("\0"):
        if line and len(line) + len(part) > width:
            lines.append(line)
            line = "  "
        line += part
    return "\n".join([*lines, line])
