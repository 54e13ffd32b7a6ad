"""Draws `Lines`: small multiples of values over a quantity."""

from __future__ import annotations

import math
from typing import Any

from treeattn.study.figures import axes as marks
from treeattn.study.figures.chart import Lines
from treeattn.study.figures.style import INK, style


def _columns(chart: Lines, share: float) -> int:
    return min(max(1, round(4 * share)), len(chart.series))


def height(chart: Lines, share: float) -> float:
    """Inches of the picture without title and notes, on so large a share of a page's width."""
    columns = _columns(chart, share)
    shape = {1: 3.2, 2: 2.4}.get(round(columns / share), 1.55)
    return math.ceil(len(chart.series) / columns) * shape + 0.4


def draw(figure: Any, chart: Lines, share: float) -> None:
    """Fill an empty figure."""
    columns = _columns(chart, share)
    grid = figure.subplots(
        math.ceil(len(chart.series) / columns), columns, sharex=True, sharey=True, squeeze=False
    )
    places = sorted({point.x for series in chart.series for point in series.points})
    for index, axes in enumerate(grid.flat):
        if index >= len(chart.series):
            axes.remove()
            grid.flat[index - columns].tick_params(labelbottom=True)
            continue
        axes.set_title(
            marks.wrapped(chart.series[index].label, int(88 * share) // columns), fontsize=8, loc="left"
        )
        _draw_all(axes, chart, index)
    _finish(grid[0, 0], chart, places, max(2, int(12 * share) // columns + 1))
    figure.supxlabel(chart.x_label, fontsize=8)
    figure.supylabel(chart.y_label, fontsize=8)


def _draw_all(axes: Any, chart: Lines, chosen: int) -> None:
    """One series in its colours, before the others in grey."""
    form = "." if chart.diagonal else "-"
    for series in chart.series:
        xs, values = [point.x for point in series.points], [point.value for point in series.points]
        axes.plot(xs, values, form, color=INK, alpha=0.2, linewidth=0.8, label="_other")
    series = chart.series[chosen]
    look = style(series.label)
    for point in series.points:
        marks.draw_mark(axes, (point.x, point.value), point, look, not chart.intervals, upright=True)
    if chart.diagonal:
        x = series.points[0].x
        axes.axline((x, x), (2 * x, 2 * x), color=INK, linewidth=0.8, label="_diagonal")
    else:
        xs, values = [point.x for point in series.points], [point.value for point in series.points]
        axes.plot(xs, values, color=look.colour, label="_line")
    marks.reference_line(axes, chart.reference, upright=False)


def _finish(axes: Any, chart: Lines, places: list[float], room: int) -> None:
    """Scales and ticks, which all axes share."""
    points = [point for series in chart.series for point in series.points]
    seen = [v for p in points for v in (p.value, p.low, p.high) if v is not None]
    marks.value_axis(axes.yaxis, True, seen, 6)
    if chart.diagonal:
        marks.value_axis(axes.xaxis, True, places, room)
        return
    if chart.x_log:
        axes.set_xscale("log", base=2)
    axes.margins(x=0.15)
    marks.place_ticks(axes, places, chart.ticks == "tokens", room)
