"""Draws `Curves`: smooth functions of one quantity, panels beside each other."""

from __future__ import annotations

from typing import Any

from treeattn.study.figures.chart import Curve, Curves
from treeattn.study.figures.style import COLOURS, INK


def height(chart: Curves, share: float) -> float:
    """Inches of the picture without title and notes, on so large a share of a page's width."""
    return 2.9 * max(share, 0.7)


def draw(figure: Any, chart: Curves, share: float) -> None:
    """Fill an empty figure."""
    panels = figure.subplots(1, len(chart.panels), squeeze=False)[0]
    for axes, curve in zip(panels, chart.panels, strict=True):
        axes.set_title(curve.label, fontsize=8, loc="left")
        axes.set_xlabel(chart.x_label, fontsize=8)
        _draw_curve(axes, curve)


def _draw_curve(axes: Any, curve: Curve) -> None:
    """The curve in its band, then the straight line, then the mark on top."""
    xs, values = [point.x for point in curve.points], [point.value for point in curve.points]
    band = [(point.x, point.low, point.high) for point in curve.points if point.low is not None]
    if band:
        axes.fill_between(*zip(*band, strict=True), color=COLOURS[0], alpha=0.18, linewidth=0)
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
