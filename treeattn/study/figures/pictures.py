"""The three kinds of charts drawn: of each its height in inches, without title and notes, and a function that
fills an empty figure. Both take the share of a page's width that the picture has. Below them what they share:
ticks in plain numbers, marks with their intervals, and long names in several lines."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from treeattn.study.figures.chart import Curve, Curves, Lines, Panel, Point, Rows, Series
from treeattn.study.figures.style import COLOURS, INK, MARKERS, PAPER, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
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
    return wrapped(label, max(14, int(34 * share)))


def _row_heights(chart: Rows, share: float) -> list[float]:
    several = max(len(panel.series) for panel in chart.panels)
    lines = (_wrapped(label, share).count("\n") + 1 for label in chart.labels)
    return [max(0.15 * count, 0.13 * several) + 0.07 for count in lines]


def _draw_panel(axes: Axes, panel: Panel, chart: Rows, middles: list[float], room: int) -> None:
    value_axis(axes.xaxis, panel.log, _numbers(panel.series), room)
    for place, series in enumerate(panel.series):
        for point in series.points:
            colour, marker = style(chart.labels[int(point.x)])
            y = middles[int(point.x)] + 0.13 * (place + 0.5 - len(panel.series) / 2)
            marker = MARKERS[place] if len(panel.series) > 1 else marker
            draw_mark(axes, (point.value, y), point, (colour, marker), chart.exact)
            if chart.exact:
                axes.annotate(plain(point.value), (point.value, y), xytext=(5, 0), va="center",
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
    reference_line(axes, panel.reference, upright=True)


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
        label = wrapped(chart.series[index].label, int(88 * share) // columns)
        axes.set_title(label, fontsize=8, loc="left")
        for series in chart.series:
            form = "." if chart.diagonal else "-"
            axes.plot(*_line(series), form, color=INK, alpha=0.2, linewidth=0.8, label="_other")
        _draw_series(axes, chart, chart.series[index])
    # Scales and ticks, which all axes share.
    first, room = grid[0, 0], max(2, int(12 * share) // columns + 1)
    points = [point for series in chart.series for point in series.points]
    places = sorted({x for p in points for x in (p.x, p.x_low, p.x_high) if x is not None})
    value_axis(first.yaxis, True, _numbers(chart.series), 6)
    if chart.diagonal:
        value_axis(first.xaxis, True, places, room)
    else:
        if chart.x_log:
            first.set_xscale("log", base=2)
        first.margins(x=0.15)
        place_ticks(first, places, chart.ticks == "tokens", room)
    figure.supxlabel(chart.x_label, fontsize=8)
    figure.supylabel(chart.y_label, fontsize=8)


def _draw_series(axes: Axes, chart: Lines, series: Series) -> None:
    look = style(series.label)
    for point in series.points:
        draw_mark(axes, (point.x, point.value), point, look, not chart.intervals, upright=True)
    if chart.diagonal:
        x = series.points[0].x
        axes.axline((x, x), (2 * x, 2 * x), color=INK, linewidth=0.8, label="_diagonal")
    else:
        axes.plot(*_line(series), color=look.colour, label="_line")
    reference_line(axes, chart.reference, upright=False)


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
