"""Draws `Rows`: values by name, as bars or as dots with intervals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treeattn.study.figures import axes as ticks
from treeattn.study.figures.chart import Panel, Point, Rows
from treeattn.study.figures.style import HATCHES, MARKERS, Style

__all__ = ["draw"]

_GREY = "#4d4d4d"


def draw(figure: Any, chart: Rows, styles: Mapping[str, Style]) -> None:
    """Fill an empty figure."""
    labels = [ticks.wrapped(label) for label in chart.labels]
    series = len(chart.panels[0].series)
    heights = (max(0.17 * (label.count("\n") + 1), 0.13 * series) + 0.1 for label in labels)
    figure.set_size_inches(8.4, 1.9 + sum(heights))
    panels = figure.subplots(1, len(chart.panels), sharey=True, squeeze=False)[0]
    for axes, panel in zip(panels, chart.panels, strict=True):
        (_draw_bars if chart.mark == "bars" else _draw_dots)(axes, panel, chart, styles)
        axes.set_xlabel(panel.x_label)
        axes.grid(axis="y", visible=False)
        if panel.reference is not None:
            axes.axvline(panel.reference[0], color="black", linewidth=0.8, zorder=1)
    panels[0].set_yticks(range(len(labels)), labels)
    panels[0].set_ylim(len(labels) - 0.4, -0.6)
    if len(chart.panels[0].series) > 1:
        panels[-1].legend(handles=_keys(chart), loc="upper left", bbox_to_anchor=(1.01, 1.0))


def _keys(chart: Rows) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    labels = [series.label for series in chart.panels[0].series]
    if chart.mark == "dots":
        return [
            Line2D([], [], color=_GREY, linestyle="none", marker=marker, label=label)
            for label, marker in zip(labels, MARKERS, strict=False)
        ]
    return [
        Patch(facecolor=_GREY if hatch is None else "white", edgecolor=_GREY, hatch=hatch, label=label)
        for label, hatch in zip(labels, HATCHES, strict=False)
    ]


def _draw_bars(axes: Any, panel: Panel, chart: Rows, styles: Mapping[str, Style]) -> None:
    positive = [p.value for series in panel.series for p in series.points if p.value > 0]
    low = min(positive, default=1.0)
    if panel.log:
        axes.set_xscale("log")
    high = 0.8 / len(panel.series)
    for place, (series, hatch) in enumerate(zip(panel.series, HATCHES, strict=False)):
        for point in series.points:
            y = point.x + (place + 0.5) * high - 0.4
            colour = styles[chart.styles[int(point.x)]].colour
            face = colour if hatch is None else "white"
            axes.barh(y, point.value, high * 0.9, color=face, edgecolor=colour, hatch=hatch, linewidth=0.8)
            _write_value(axes, point, y, low if panel.log else 0.0)
    for row, why in panel.absent:
        axes.text(0.01, row, why, transform=axes.get_yaxis_transform(), va="center", color=_GREY, fontsize=7)
    top = max(positive, default=1.0)
    room = max(4.0, (2 * top / low) ** (0.2 * len(chart.panels)))  # for the number beside the longest bar
    axes.set_xlim((low / 2, top * room) if panel.log else (0, top * 1.15))
    ticks.value_axis(axes.xaxis, panel.log, low / 2, top * room, 8 // len(chart.panels))


def _write_value(axes: Any, point: Point, y: float, start: float) -> None:
    """The number beside its bar. A bar of nothing, which no logarithmic axis shows, has it at the axis."""
    end, left = (point.value, 3) if point.value > 0 or not start else (start / 2, 2)
    axes.annotate(
        ticks.plain(point.value), (end, y), xytext=(left, 0), textcoords="offset points",
        va="center", fontsize=6.5, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4},
    )  # fmt: skip


def _draw_dots(axes: Any, panel: Panel, chart: Rows, styles: Mapping[str, Style]) -> None:
    if panel.log:
        axes.set_xscale("log")
    several = len(panel.series) > 1
    for place, series in enumerate(panel.series):
        for point in series.points:
            row = int(point.x)
            y = row + ((place + 0.5) / len(panel.series) - 0.5) * 0.6
            style = styles[chart.styles[row]]
            marker = MARKERS[place] if several else style.marker
            _draw_dot(axes, point, y, style.colour, marker)
    seen = [v for s in panel.series for p in s.points for v in (p.value, p.low, p.high) if v]
    ticks.value_axis(axes.xaxis, panel.log, min(seen), max(seen), 8 // len(chart.panels))


def _draw_dot(axes: Any, point: Point, y: float, colour: str, marker: str) -> None:
    face = colour if point.low is not None else "white"
    axes.plot([point.value], [y], marker, color=colour, markerfacecolor=face)
    if point.low is not None:
        axes.hlines([y], [point.low], [point.high], colors=colour, linewidth=1.0)
        axes.plot([point.low, point.high], [y, y], "|", color=colour, markersize=6)
