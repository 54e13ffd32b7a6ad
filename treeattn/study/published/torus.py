"""Messages on a torus: how many hops they take, and how many share the busiest link.

Rank 0 is at the origin and the first dimension runs fastest; a message goes dimension by dimension, the
shorter way around, up where both are as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2

import numpy as np

from treeattn.partial import Array


def hops_and_load(shape: Sequence[int], pairs: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """(log2 of the hops, mean over the messages; log2 of the messages on the busiest link); 0 and 0 without a
    torus. Messages of one round, (sender, receiver)."""
    if not shape:
        return 0.0, 0.0
    strides = np.cumprod([1, *shape[:-1]])
    here, there = np.array(pairs).T
    at, hops, busiest = here.copy(), np.zeros(len(here)), 1
    for side, stride in zip(shape, strides, strict=True):
        apart = (there // stride - here // stride) % side
        steps = np.where(2 * apart <= side, apart, apart - side)
        hops += np.abs(steps)
        busiest = max(busiest, _along(at, steps, side, int(stride)))
        at += ((there // stride) % side - (at // stride) % side) * stride
    return float(np.log2(np.maximum(hops, 1)).mean()), log2(busiest)


def _along(at: Array, steps: Array, side: int, stride: int) -> int:
    """Messages on the busiest link of one dimension; links up and down are two."""
    ranks = int(at.max()) + stride * side + 1
    most = 0
    for way in (1, -1):
        load = np.zeros(ranks, int)
        left, place = np.where(steps * way > 0, np.abs(steps), 0), at.copy()
        while left.any():
            going = left > 0
            np.add.at(load, place[going], 1)
            coordinate = (place // stride) % side
            place = place + np.where(going, ((coordinate + way) % side - coordinate) * stride, 0)
            left = left - going
        most = max(most, int(load.max()))
    return most
