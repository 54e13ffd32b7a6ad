"""Draws `Lines`: values over a quantity."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from treeattn.study.figures import axes as ticks
from treeattn.study.figures.chart import Lines, Point, Series
from treeattn.study.figures.style import Style

__all__ = ["draw"]

# Points of one place stand side by side over this part of the way to the next place.
_SPREAD = 0.4


def draw(figure: Any, chart: Lines, styles: Mapping[str, Style]) -> None:
    """Fill an empty figure."""
    figure.set_size_inches(8.4, max(5.0, 1.9 + 0.19 * _legend_lines(chart)))
    axes = figure.add_subplot()
    places = sorted({point.x for series in chart.series for point in series.points})
    if chart.x_log:
        axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for place, series in enumerate(chart.series):
        shift = (place + 0.5) / len(chart.series) - 0.5
        xs = [_beside(point.x, shift * _SPREAD, places, chart) for point in series.points]
        _draw_series(axes, series, xs, styles[series.label], chart)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    _finish_axes(axes, chart, places)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0, handlelength=3.6)


def _legend_lines(chart: Lines) -> int:
    return sum(ticks.wrapped(series.label).count("\n") + 1 for series in chart.series)


def _beside(x: float, shift: float, places: list[float], chart: Lines) -> float:
    """`x` moved by a share of the smallest distance between places, so that intervals do not hide others."""
    if not chart.joined or len(places) < 2:
        return x
    pairs = list(itertools.pairwise(places))
    if chart.x_log:
        return float(x * min(after / before for before, after in pairs) ** shift)
    return x + shift * min(after - before for before, after in pairs)


def _draw_series(axes: Any, series: Series, xs: list[float], style: Style, chart: Lines) -> None:
    values = [point.value for point in series.points]
    line = {"color": style.colour, "linestyle": style.dashes if chart.joined else "none"}
    axes.plot(xs, values, marker=style.marker, label=ticks.wrapped(series.label), **line)
    if chart.intervals:
        _draw_intervals(axes, series.points, xs, style)


def _draw_intervals(axes: Any, points: tuple[Point, ...], xs: list[float], style: Style) -> None:
    """Vertical bars with caps, from low to high; marks without an interval become white inside."""
    known = [(x, p.low, p.high) for x, p in zip(xs, points, strict=True) if p.low is not None]
    bare = [(x, p.value) for x, p in zip(xs, points, strict=True) if p.low is None]
    if known:
        places, lows, highs = zip(*known, strict=True)
        axes.vlines(places, lows, highs, colors=style.colour, linewidth=1.0)
        axes.plot(places * 2, lows + highs, "_", color=style.colour, markersize=6)
    if bare:
        places, values = zip(*bare, strict=True)
        axes.plot(places, values, style.marker, color=style.colour, markerfacecolor="white", zorder=3)


def _finish_axes(axes: Any, chart: Lines, places: list[float]) -> None:
    points = [point for series in chart.series for point in series.points]
    seen = [v for p in points for v in (p.value, p.low, p.high) if v is not None and v > 0] or [1.0]
    ticks.value_axis(axes.yaxis, True, min(seen), max(seen), 12)
    if chart.reference == "diagonal":
        both = [*seen, *places]
        ends = [min(both) / 1.3, max(both) * 1.3]
        axes.plot(
            ends, ends, color="black", linewidth=0.8, linestyle=(0, (4, 3)), label="prediction = measurement"
        )
        ticks.value_axis(axes.xaxis, True, ends[0], ends[1], 9)
        return
    if chart.reference is not None:
        axes.axhline(chart.reference[0], color="black", linewidth=0.8, zorder=1)
    ticks.place_ticks(axes, places, chart.ticks == "tokens")
