"""Why a simulated step takes as long as it does: the chain of what had to wait for what, from its last end
back.

Segments follow each other without a gap, so they add up to the time of the step.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from treeattn.collectives.clusters.simulate import MessageEvent, Simulation, Step

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
    """What took `microseconds` of the step: on a tier on the way `to` another rank, or by a rank itself (both
    None). price: of what it was paid; assumed: one that was not measured."""

    kind: Kind
    rank: int
    tier: str | None
    round: int
    microseconds: float
    price: str = ""
    assumed: bool = False
    to: int | None = None


@dataclass(frozen=True, slots=True)
class Cost:
    """A time in microseconds, by the prices that it is paid of: each by name, and whether it is assumed.

    To first order a price that is wrong by a factor moves the time by its share: the chain stays the longest.
    """

    by_price: Mapping[tuple[str, bool], float]

    @property
    def time(self) -> float:
        """The sum, in microseconds."""
        return sum(self.by_price.values())

    def __add__(self, other: Cost) -> Cost:
        names = self.by_price.keys() | other.by_price.keys()
        return Cost({name: self.by_price.get(name, 0.0) + other.by_price.get(name, 0.0) for name in names})

    def __rmul__(self, factor: float) -> Cost:
        return Cost({name: factor * time for name, time in self.by_price.items()})


def cost(simulation: Simulation) -> Cost:
    if not any(simulation.steps):
        return Cost({("", False): simulation.time})
    found: defaultdict[tuple[str, bool], float] = defaultdict(float)
    for segment in critical_path(simulation):
        found[segment.price, segment.assumed] += segment.microseconds
    return Cost(found)


def critical_path(simulation: Simulation) -> tuple[Segment, ...]:
    """From the first rank's start to the last rank's end."""
    if not any(simulation.steps):
        return ()
    rank = max(range(simulation.schedule.size), key=simulation.ends.__getitem__)
    found: list[Segment] = []
    index = len(simulation.steps[rank]) - 1
    while index >= 0:
        step = simulation.steps[rank][index]
        flight = following = step.last
        while following is not None:
            found += _receiving(simulation, following)
            flight, following = following, following.after
        if flight is None or flight.recv_start > flight.delivered:  # the receiver was busy with its own sends
            found += _own(simulation, rank, step, step.sends)
        else:
            found += _flying(simulation, flight)
            rank = flight.src
            step = next(step for step in simulation.steps[rank] if step.round == flight.round)
            # A sender that was held up by its receiver waited from when it was ready.
            found += _own(simulation, rank, step, step.sends[: step.sends.index(flight) + 1])
        index = simulation.steps[rank].index(step) - 1
    start = simulation.starts[rank]
    found += [_of_executor(simulation, rank, -1, "call")]
    found += [Segment("start", rank, None, -1, start)] if start else []
    return tuple(reversed([segment for segment in found if segment.microseconds > 0]))


def _of_executor(simulation: Simulation, rank: int, round_: int, price: str) -> Segment:
    prices, named = simulation.prices, f"{simulation.executor}.{price}"
    return Segment("executor", rank, None, round_, getattr(prices, price), named, price in prices.assumed)


def _overheads(simulation: Simulation, rank: int, flight: MessageEvent) -> Iterator[Segment]:
    """What a message costs the processor at one end."""
    tier = simulation.cluster.tiers[flight.tier]
    assumed = "overhead" in tier.assumed
    yield Segment("overhead", rank, None, flight.round, tier.overhead, f"{tier.name}.overhead", assumed)
    yield _of_executor(simulation, rank, flight.round, "message")


def _receiving(simulation: Simulation, flight: MessageEvent) -> Iterator[Segment]:
    prices = simulation.prices
    if flight.merge:
        merge = flight.bytes * 1e-3 / prices.merge_bandwidth
        named, assumed = f"{simulation.executor}.merge_bandwidth", "merge_bandwidth" in prices.assumed
        yield Segment("merge", flight.dst, None, flight.round, merge, named, assumed)
    yield from _overheads(simulation, flight.dst, flight)


def _flying(simulation: Simulation, flight: MessageEvent) -> Iterator[Segment]:
    tier = simulation.cluster.tiers[flight.tier]
    link = simulation.cluster.link(flight.tier, flight.bytes, simulation.prices.pulls)
    rate = "read_bandwidth" if simulation.prices.pulls and tier.read_bandwidth else "bandwidth"
    of_bytes = not {rate, "taper"}.isdisjoint(tier.assumed)
    busy = "gap" if link.gap > flight.bytes * link.byte else "bandwidth"  # what a port is taken by
    of_port = of_bytes if busy == "bandwidth" else "gap" in tier.assumed
    of_ports = of_port or not {"shared_gap", "shared_bandwidth"}.isdisjoint(tier.assumed)
    of_latency = link.source in tier.assumed
    parts: tuple[tuple[Kind, float, str, bool], ...] = (
        ("bytes", flight.delivered - flight.last_port, "bandwidth", of_bytes),
        ("port", flight.last_port - flight.began - link.latency, busy, of_ports),
        ("latency", link.latency, link.source, of_latency),
        ("port", flight.began - flight.ready, busy, of_ports),
    )
    for kind, time, price, assumed in parts:
        named = f"{tier.name}.{price}"
        yield Segment(kind, flight.src, tier.name, flight.round, time, named, assumed, flight.dst)


def _own(simulation: Simulation, rank: int, step: Step, sends: Sequence[MessageEvent]) -> Iterator[Segment]:
    """From the step's entry until the rank had sent these messages."""
    for flight in reversed(sends):
        yield from _overheads(simulation, rank, flight)
    yield _of_executor(simulation, rank, step.round, "round")
    if step.far:
        yield _of_executor(simulation, rank, step.round, "far_round")


def assumed_share(path: tuple[Segment, ...]) -> float:
    """How much of the time of a path comes from assumed prices, 0 to 1."""
    total = sum(segment.microseconds for segment in path)
    return sum(segment.microseconds for segment in path if segment.assumed) / total if total else 0.0


def in_words(path: tuple[Segment, ...]) -> str:
    """``21.3 us: 13.5 latency (rail 3, nvlink 1), 4.2 bytes*, ..``, the longest first; a star where a part of
    it comes from assumed prices."""
    times: Counter[str] = Counter()
    hops: Counter[str] = Counter()
    for segment in path:
        times[segment.kind] += segment.microseconds  # type: ignore[assignment]
        hops[segment.tier or ""] += segment.kind == "latency"
    starred = {segment.kind for segment in path if segment.assumed}
    parts = [
        f"{time:.1f} {_WORDS[kind]}{'*' if kind in starred else ''}"
        for kind, time in times.most_common()
        if time >= 0.05
    ]
    through = ", ".join(f"{tier} {count}" for tier, count in hops.items() if tier and count)
    parts = [part + f" ({through})" if "latency" in part and through else part for part in parts]
    return f"{sum(times.values()):.1f} us: {', '.join(parts)}"
