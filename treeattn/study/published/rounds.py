"""What a schedule does, as sums over its rounds: what times are made of, before any price is known.

Rounds follow one another and each lasts as long as its slowest message, so times are sums over rounds. They
are read from the schedules themselves.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from treeattn.collectives import build
from treeattn.study.published.measurements import Measurement, Run
from treeattn.study.published.torus import hops_and_load

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
