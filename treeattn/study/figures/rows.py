"""Draws `Rows`: values by name, as marks with intervals or with their numbers."""

from __future__ import annotations

import itertools
import textwrap
from typing import Any

from treeattn.study.figures import axes as marks
from treeattn.study.figures.chart import Panel, Rows
from treeattn.study.figures.style import INK, MARKERS, style

_NARROW = 0.6  # of a page's width; panels stand below each other there


def _wrapped(label: str, share: float) -> str:
    return marks.wrapped(label, max(14, int(34 * share)))


def _heights(chart: Rows, share: float) -> list[float]:
    """Inches of each row."""
    several = max(len(panel.series) for panel in chart.panels)
    lines = (_wrapped(label, share).count("\n") + 1 for label in chart.labels)
    return [max(0.15 * count, 0.13 * several) + 0.07 for count in lines]


def height(chart: Rows, share: float) -> float:
    """Inches of the picture without title and notes, on so large a share of a page's width."""
    one = sum(_heights(chart, share))
    return len(chart.panels) * (one + 0.6) + 0.4 if share < _NARROW else one + 1.0


def draw(figure: Any, chart: Rows, share: float) -> None:
    """Fill an empty figure."""
    shape = (len(chart.panels), 1) if share < _NARROW else (1, len(chart.panels))
    panels = figure.subplots(*shape, sharey=True, squeeze=False).flat
    heights = _heights(chart, share)
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
        figure.legend(handles=_keys(labels), loc="outside lower right", ncols=len(labels))


def _keys(labels: list[str]) -> list[Any]:
    from matplotlib.lines import Line2D

    return [
        Line2D([], [], color=INK, linestyle="none", marker=marker, label=label)
        for label, marker in zip(labels, MARKERS, strict=False)
    ]


def _draw_panel(axes: Any, panel: Panel, chart: Rows, middles: list[float], room: int) -> None:
    points = [point for series in panel.series for point in series.points]
    seen = [v for p in points for v in (p.value, p.low, p.high) if v is not None]
    marks.value_axis(axes.xaxis, panel.log, seen, room)
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
        axes.set_xlim(right=to_screen.inverted().transform(wider))
    marks.reference_line(axes, panel.reference, upright=True)
