"""The three kinds of charts drawn: of each its height in inches, without title and notes, and a function that
fills an empty figure. Both take the share of a page's width that the picture has."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING

from treeattn.study.figures import axes as marks
from treeattn.study.figures.chart import Curve, Curves, Lines, Panel, Rows, Series
from treeattn.study.figures.style import COLOURS, INK, MARKERS, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NARROW = 0.6  # of a page's width; panels stand below each other there


def rows_height(chart: Rows, share: float) -> float:
    """As many rows as there are names, each as high as its name and its marks."""
    one = sum(_row_heights(chart, share))
    return len(chart.panels) * (one + 0.6) + 0.4 if share < _NARROW else one + 1.0


def draw_rows(figure: Figure, chart: Rows, share: float) -> None:
    """Values by name, as marks with intervals or with their numbers."""
    shape = (len(chart.panels), 1) if share < _NARROW else (1, len(chart.panels))
    panels = figure.subplots(*shape, sharey=True, squeeze=False).flat
    heights = _row_heights(chart, share)
    middles = [end - height / 2 for end, height in zip(itertools.accumulate(heights), heights, strict=True)]
    for axes, panel in zip(panels, chart.panels, strict=True):
        _draw_panel(axes, panel, chart, middles, max(3, int(9 * share) // shape[1]))
        axes.set_title(panel.title, fontsize=8, loc="left")
        axes.set_xlabel(textwrap.fill(panel.x_label, int(60 * share / shape[1])), fontsize=8)
        axes.tick_params(axis="y", length=0)
    panels[0].set_yticks(middles, [_wrapped(label, share) for label in chart.labels])
    panels[0].set_ylim(sum(heights), 0)
    labels = [series.label for series in chart.panels[0].series]
    if len(labels) > 1:
        from matplotlib.lines import Line2D

        keys = [
            Line2D([], [], color=INK, linestyle="none", marker=marker, label=label)
            for label, marker in zip(labels, MARKERS, strict=False)
        ]
        figure.legend(handles=keys, loc="outside lower right", ncols=len(labels))


def _wrapped(label: str, share: float) -> str:
    return marks.wrapped(label, max(14, int(34 * share)))


def _row_heights(chart: Rows, share: float) -> list[float]:
    several = max(len(panel.series) for panel in chart.panels)
    lines = (_wrapped(label, share).count("\n") + 1 for label in chart.labels)
    return [max(0.15 * count, 0.13 * several) + 0.07 for count in lines]


def _draw_panel(axes: Axes, panel: Panel, chart: Rows, middles: list[float], room: int) -> None:
    marks.value_axis(axes.xaxis, panel.log, _numbers(panel.series), room)
    for place, series in enumerate(panel.series):
        for point in series.points:
            colour, marker = style(chart.labels[int(point.x)])
            y = middles[int(point.x)] + 0.13 * (place + 0.5 - len(panel.series) / 2)
            marker = MARKERS[place] if len(panel.series) > 1 else marker
            marks.draw_mark(axes, (point.value, y), point, (colour, marker), chart.exact)
            if chart.exact:
                axes.annotate(marks.plain(point.value), (point.value, y), xytext=(5, 0), va="center",
                              textcoords="offset points", fontsize=7)  # fmt: skip
    for row, why in panel.absent:
        axes.text(
            0.01, middles[row], why, transform=axes.get_yaxis_transform(), va="center", fontsize=7, alpha=0.7
        )
    if chart.exact:  # room for the number beside the last mark
        to_screen = axes.xaxis.get_transform()
        low, high = to_screen.transform(axes.get_xlim())
        wider = high + 0.12 * len(chart.panels) * (high - low)
        axes.set_xlim(right=float(to_screen.inverted().transform(wider)))
    marks.reference_line(axes, panel.reference, upright=True)


def lines_height(chart: Lines, share: float) -> float:
    """A grid of at most four columns on a page."""
    columns = _columns(chart, share)
    shape = {1: 3.2, 2: 2.4}.get(round(columns / share), 1.55)
    return math.ceil(len(chart.series) / columns) * shape + 0.4


def _columns(chart: Lines, share: float) -> int:
    return min(max(1, round(4 * share)), len(chart.series))


def draw_lines(figure: Figure, chart: Lines, share: float) -> None:
    """Small multiples of values over a quantity: each series in its colours, before the others in grey."""
    columns = _columns(chart, share)
    grid = figure.subplots(
        math.ceil(len(chart.series) / columns), columns, sharex=True, sharey=True, squeeze=False
    )
    for index, axes in enumerate(grid.flat):
        if index >= len(chart.series):
            axes.remove()
            grid.flat[index - columns].tick_params(labelbottom=True)
            continue
        label = marks.wrapped(chart.series[index].label, int(88 * share) // columns)
        axes.set_title(label, fontsize=8, loc="left")
        for series in chart.series:
            form = "." if chart.diagonal else "-"
            axes.plot(*_line(series), form, color=INK, alpha=0.2, linewidth=0.8, label="_other")
        _draw_series(axes, chart, chart.series[index])
    # Scales and ticks, which all axes share.
    first, room = grid[0, 0], max(2, int(12 * share) // columns + 1)
    points = [point for series in chart.series for point in series.points]
    places = sorted({x for p in points for x in (p.x, p.x_low, p.x_high) if x is not None})
    marks.value_axis(first.yaxis, True, _numbers(chart.series), 6)
    if chart.diagonal:
        marks.value_axis(first.xaxis, True, places, room)
    else:
        if chart.x_log:
            first.set_xscale("log", base=2)
        first.margins(x=0.15)
        marks.place_ticks(first, places, chart.ticks == "tokens", room)
    figure.supxlabel(chart.x_label, fontsize=8)
    figure.supylabel(chart.y_label, fontsize=8)


def _draw_series(axes: Axes, chart: Lines, series: Series) -> None:
    look = style(series.label)
    for point in series.points:
        marks.draw_mark(axes, (point.x, point.value), point, look, not chart.intervals, upright=True)
    if chart.diagonal:
        x = series.points[0].x
        axes.axline((x, x), (2 * x, 2 * x), color=INK, linewidth=0.8, label="_diagonal")
    else:
        axes.plot(*_line(series), color=look.colour, label="_line")
    marks.reference_line(axes, chart.reference, upright=False)


def curves_height(chart: Curves, share: float) -> float:
    """One row of panels."""
    return 2.9 * max(share, 0.7)


def draw_curves(figure: Figure, chart: Curves, share: float) -> None:
    """Smooth functions of one quantity, panels beside each other."""
    panels = figure.subplots(1, len(chart.panels), squeeze=False)[0]
    for axes, curve in zip(panels, chart.panels, strict=True):
        axes.set_title(curve.label, fontsize=8, loc="left")
        axes.set_xlabel(chart.x_label, fontsize=8)
        _draw_curve(axes, curve)


def _draw_curve(axes: Axes, curve: Curve) -> None:
    """The curve in its band, then the straight line, then the mark on top."""
    xs, values = _line(curve)
    band = [(point.x, point.low, point.high) for point in curve.points if point.low is not None]
    if band:
        places, lows, highs = zip(*band, strict=True)
        axes.fill_between(places, lows, highs, color=COLOURS[0], alpha=0.18, linewidth=0)
    axes.plot(xs, values, color=COLOURS[0], label="_curve")
    limits = axes.get_ylim()
    if curve.line is not None:
        x, y, slope = curve.line
        ends = (xs[0], xs[-1])
        line = [y + slope * (end - x) for end in ends]
        axes.plot(ends, line, color=COLOURS[1], linestyle=(0, (4, 2)), label="_line")
    axes.set_ylim(limits)
    if curve.mark is not None:
        axes.plot(curve.mark.x, curve.mark.value, "o", color=INK, zorder=3, label=f"{curve.mark.value:g}")


def _line(series: Series | Curve) -> tuple[list[float], list[float]]:
    """Where its points are, and their values."""
    return [point.x for point in series.points], [point.value for point in series.points]


def _numbers(series: Iterable[Series]) -> list[float]:
    """All values, and the ends of their intervals: what an axis must have room for."""
    points = [point for one in series for point in one.points]
    return [v for p in points for v in (p.value, p.low, p.high) if v is not None]
