"""Why a simulated step takes as long as it does: the chain of what had to wait for what, from its last end
back.

Segments follow each other without a gap, so they add up to the time of the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Literal, NamedTuple

from treeattn.collectives.clusters.simulate import Flight, Simulation, Step

__all__ = ["Segment", "critical_path", "in_words"]

Kind = Literal["start", "executor", "overhead", "merge", "latency", "bytes", "port"]

_WORDS = {
    "start": "before the first rank of the chain began",
    "executor": "executor",
    "overhead": "overhead of messages",
    "merge": "merging",
    "latency": "latency",
    "bytes": "bytes",
    "port": "waiting for ports and receivers",
}


class Segment(NamedTuple):
    """What took `microseconds` of the step: on a tier, or by a rank itself (tier None)."""

    kind: Kind
    rank: int
    tier: str | None
    round: int
    microseconds: float


def critical_path(simulation: Simulation) -> tuple[Segment, ...]:
    """From the first rank's start to the last rank's end."""
    if not any(simulation.steps):
        return ()
    rank = max(range(simulation.schedule.size), key=simulation.ends.__getitem__)
    found: list[Segment] = []
    index = len(simulation.steps[rank]) - 1
    while index >= 0:
        step = simulation.steps[rank][index]
        flight = step.last
        while flight is not None and flight.after is not None:
            found += _receiving(simulation, flight)
            flight = flight.after
        if flight is not None:
            found += _receiving(simulation, flight)
        if flight is None or flight.taken_up > flight.landed:  # the receiver was busy with its own sends
            found += _own(simulation, rank, step, step.sent)
        else:
            found += _flying(simulation, flight)
            rank = flight.src
            step = next(step for step in simulation.steps[rank] if step.round == flight.round)
            # A sender that was held up by its receiver waited from when it was ready.
            found += _own(simulation, rank, step, flight.ready)
        index = simulation.steps[rank].index(step) - 1
    start = simulation.starts[rank]
    found += [Segment("executor", rank, None, -1, simulation.executor.call)]
    found += [Segment("start", rank, None, -1, start)] if start else []
    return tuple(reversed([segment for segment in found if segment.microseconds > 0]))


def _receiving(simulation: Simulation, flight: Flight) -> Iterator[Segment]:
    merge = flight.bytes * 1e-3 / simulation.executor.merge_bandwidth if flight.merge else 0.0
    yield Segment("merge", flight.dst, None, flight.round, merge)
    yield Segment("overhead", flight.dst, None, flight.round, flight.done - flight.taken_up - merge)


def _flying(simulation: Simulation, flight: Flight) -> Iterator[Segment]:
    tier = simulation.cluster.tiers[flight.tier].name
    link = simulation.cluster.link(flight.tier, flight.bytes, simulation.executor.pulls)
    waited = flight.landing - flight.began - link.latency
    for kind, time in (
        ("bytes", flight.landed - flight.landing),
        ("port", waited),
        ("latency", link.latency),
        ("port", flight.began - flight.ready),
    ):
        yield Segment(kind, flight.src, tier, flight.round, time)  # type: ignore[arg-type]


def _own(simulation: Simulation, rank: int, step: Step, until: float) -> Iterator[Segment]:
    """From the step's entry until the rank had sent what is meant."""
    yield Segment("overhead", rank, None, step.round, until - step.entered - simulation.executor.round)
    yield Segment("executor", rank, None, step.round, simulation.executor.round)


def in_words(path: tuple[Segment, ...]) -> str:
    """``21.3 us: 13.5 latency (rail 3, nvlink 1), 4.2 bytes, ..``, the longest first."""
    times: Counter[str] = Counter()
    hops: Counter[str] = Counter()
    for segment in path:
        times[segment.kind] += segment.microseconds  # type: ignore[assignment]
        hops[segment.tier or ""] += segment.kind == "latency"
    parts = [f"{time:.1f} {_WORDS[kind]}" for kind, time in times.most_common() if time >= 0.05]
    through = ", ".join(f"{tier} {count}" for tier, count in hops.items() if tier and count)
    parts = [part + f" ({through})" if part.endswith("latency") and through else part for part in parts]
    return f"{sum(times.values()):.1f} us: {', '.join(parts)}"
