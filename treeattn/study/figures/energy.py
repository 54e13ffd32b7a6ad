"""The energy along one dimension of zeta: attention is its slope at 0, and a variance its curvature."""

from __future__ import annotations

from typing import Any

import numpy as np

from treeattn import energy
from treeattn.collectives.runtime.communicator import Given
from treeattn.errors import ArgumentError
from treeattn.study.figures.chart import Curve, Curves, Point
from treeattn.study.figures.pictures import plain


def along(
    dimension: int,
    q: Any,
    k: Any,
    v: Any,
    *,
    comm: Given = None,
    scale: float | None = None,
    reach: float = 2.0,
    points: int = 81,
    **options: Any,
) -> Curves:
    """F and dF/dt where zeta is t in one dimension of the values and 0 in the others. Collective.

    q: NumPy array [1, 1, 1, head_dim], one query of one head. k, v, options: as for `treeattn.energy.value`.
    t: `points` of them from -reach to reach, each a query of its own in one call of `value` and of `moments`.
    """
    if q.shape[:3] != (1, 1, 1):
        raise ArgumentError(f"q has shape {list(q.shape)}: the picture is of one query, [1, 1, 1, head_dim]")
    tilts = np.linspace(-reach, reach, points | 1).astype(q.dtype)  # an odd number has a point at 0
    zeta = np.zeros((1, len(tilts), 1, v.shape[3]), q.dtype)
    zeta[0, :, 0, dimension] = tilts
    arrays, options = (np.repeat(q, len(tilts), axis=1), k, v), {"comm": comm, "scale": scale} | options
    values = energy.value(zeta, *arrays, **options)[0, 0]
    slopes, variances = (one[0, :, 0, dimension] for one in energy.moments(*arrays, zeta=zeta, **options))
    xs, spreads = tilts.astype(float).tolist(), np.sqrt(variances)
    return _chart(dimension, xs, values.tolist(), slopes.tolist(), spreads.tolist())


def _chart(
    dimension: int, xs: list[float], values: list[float], slopes: list[float], spreads: list[float]
) -> Curves:
    zero = len(xs) // 2
    slope, spread = slopes[zero], spreads[zero]
    curve = tuple(map(Point, xs, values))
    band = tuple(
        Point(x, value, value - wide, value + wide)
        for x, value, wide in zip(xs, slopes, spreads, strict=True)
    )
    notes = (
        "Left: the energy; dashed: its tangent at 0, whose slope is attention. Right: that slope everywhere, "
        "the average of the values with weights tilted by t; band: one standard deviation of the values, the "
        "root of the slope of this curve. Dots: t = 0, where it is attention.",
    )
    return Curves(
        "energy",
        f"Attention is the slope of an energy: dimension {dimension} of the values",
        f"lse {plain(values[zero])} · attention {plain(slope)} · standard deviation {plain(spread)}",
        notes,
        "t, the tilt",
        (
            Curve("F(t)", curve, Point(0, values[zero]), (0.0, values[zero], slope)),
            Curve("dF/dt", band, Point(0, slope)),
        ),
    )
