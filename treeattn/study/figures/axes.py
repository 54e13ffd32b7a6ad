"""Ticks in plain numbers, and long names in several lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

__all__ = ["brief", "place_ticks", "plain", "value_axis", "wrapped"]


def brief(value: float) -> str:
    """65536 as 64Ki, 80000 as 80k, others in full."""
    for unit, size in (("Mi", 1 << 20), ("Ki", 1 << 10), ("M", 10**6), ("k", 10**3)):
        if value >= size and value % size == 0:
            return f"{value / size:g}{unit}"
    return plain(value)


def plain(value: float) -> str:
    """With thousands apart, and three digits of smaller numbers."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def value_axis(axis: Any, log: bool, low: float, high: float, room: int) -> None:
    """At most about `room` ticks of a value axis from `low` to `high`; on logarithmic ones at 1, 2 and 5, at
    1 and 3, or at powers of ten."""
    from matplotlib import ticker

    if log:
        decades = math.log10(high / low)
        choices = [(1.0, 2.0, 5.0), (1.0, 3.0), (1.0,)]
        steps = next((steps for steps in choices if decades * len(steps) <= room), (1.0,))
        axis.set_major_locator(ticker.LogLocator(subs=steps, numticks=room + 2))
        axis.set_minor_formatter(ticker.NullFormatter())
    else:
        axis.set_major_locator(ticker.MaxNLocator(room))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: _short(value)))


def _short(value: float) -> str:
    """10000 as 10k: ticks of logarithmic axes are round."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if value >= 10_000 and value >= size:
            return f"{value / size:,g}{unit}"
    return plain(value)


def place_ticks(axes: Any, places: Sequence[float], tokens: bool) -> None:
    """Ticks of a horizontal axis where there are points, at most 10 of them."""
    from matplotlib import ticker

    step = math.ceil(len(places) / 10)
    shown = places[::step]
    axes.xaxis.set_major_locator(ticker.FixedLocator(list(shown)))
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    write = brief if tokens else plain
    axes.xaxis.set_major_formatter(ticker.FixedFormatter([write(place) for place in shown]))


def wrapped(name: str, width: int = 34) -> str:
    """A name broken after colons and commas where it is longer than `width` characters."""
    lines, line = [], ""
    for part in name.replace(":", ":\0").replace("(", "(\0").split("\0"):
        if line and len(line) + len(part) > width:
            lines.append(line)
            line = "  "
        line += part
    return "\n".join([*lines, line])
