"""What a schedule does, as sums over its rounds: what times are made of, before any price is known.

Rounds follow one another and each lasts as long as its slowest message, so times are sums over rounds. They
are read from the schedules themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import log2
from typing import NamedTuple

import numpy as np

from treeattn.collectives import build
from treeattn.partial import Array
from treeattn.study.published.measurements import Measurement, Run

#: Bytes from which a message takes another way: out of inline, out of short eager, into rendezvous.
STEPS = (192 + 1, 2048, 16384)


class Round(NamedTuple):
    """`times` rounds alike: part of the vector that the longest message carries; whether it is merged;
    log2 of the hops on a torus, and of the load of its busiest link; whether any message leaves its
    group."""

    times: int
    share: float
    merge: bool
    reach: float
    load: float
    leaves: bool


class Sums(NamedTuple):
    """Of one step. Rounds by the size class of their messages (of those, by reach, and that leave a
    group); bytes sent one after the other (and by load), and merged."""

    rounds: tuple[float, ...]
    reach: tuple[float, ...]
    leaving: tuple[float, ...]
    sent: float
    sent_loaded: float
    merged: float

    @property
    def all_rounds(self) -> float:
        """Of every size class."""
        return sum(self.rounds)


def sums(measurement: Measurement) -> Sums:
    """What the program's schedule adds up to on this run."""
    classes = len(STEPS) + 1
    counted, reach, leaving = [0.0] * classes, [0.0] * classes, [0.0] * classes
    sent = loaded = merged = 0.0
    for round_ in _rounds(measurement.scheme, measurement.run):
        size = round_.share * measurement.bytes
        at = sum(size >= step for step in STEPS)
        counted[at] += round_.times
        reach[at] += round_.times * round_.reach
        leaving[at] += round_.times * round_.leaves
        sent += round_.times * size
        loaded += round_.times * size * round_.load
        merged += round_.times * size * round_.merge
    return Sums(tuple(counted), tuple(reach), tuple(leaving), sent, loaded, merged)


@cache
def _rounds(scheme: str, run: Run) -> tuple[Round, ...]:
    if scheme == "ring":
        return _ring(run)
    schedule = build(scheme, run.ranks)
    found = []
    for transfers in schedule.rounds:
        pairs = [(t.src, t.dst) for t in transfers]
        share = max(len(t.chunks) for t in transfers) / schedule.chunks
        torus = hops_and_load(run.shape, pairs)
        found.append(Round(1, share, transfers[0].merge, *torus, _leaves(run, pairs)))
    return tuple(found)


def _ring(run: Run) -> tuple[Round, ...]:
    """All rounds of a ring are alike; the schedule itself is not made for thousands of ranks."""
    pairs = [(rank, (rank + 1) % run.ranks) for rank in range(run.ranks)]
    share, torus, leaves = 1 / run.ranks, hops_and_load(run.shape, pairs), _leaves(run, pairs)
    return tuple(Round(run.ranks - 1, share, merge, *torus, leaves) for merge in (True, False))


def _leaves(run: Run, pairs: list[tuple[int, int]]) -> bool:
    return bool(run.groups) and any(run.groups[one] != run.groups[other] for one, other in pairs)


def hops_and_load(shape: Sequence[int], pairs: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """(log2 of the hops, mean over the messages; log2 of the messages on the busiest link); 0 and 0 without a
    torus. Messages of one round, (sender, receiver).

    Rank 0 is at the origin and the first dimension runs fastest; a message goes dimension by dimension, the
    shorter way around, up where both are as long.
    """
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
