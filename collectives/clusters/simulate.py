"""What a schedule costs on a described cluster: every transfer it makes, one clock for each rank.

A rank enters a round when it has finished the one before (rounds are no barriers). It pays the executor for
the round, then the overhead of each message that it sends; a message waits for the sender's port, is under
way for the tier's latency, waits for the receiver's port, and takes its bytes; the receiver, once its own
are sent, pays overhead and merge for one arrival after the other. Ports: of the rank, of the pair on a
mesh, of the network card that ranks of a node share, of tapered uplinks, and of what a whole tier shares.

Source: LogGP (Alexandrov et al., SPAA 1995), simulated event by event as LogGOPSim does (Hoefler,
Schneider, Lumsdaine, HPDC 2010), with ports in place of one gap.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count

from treeattn.collectives.clusters.bound import lower_bound
from treeattn.collectives.clusters.description import Cluster, Executor, Link
from treeattn.collectives.clusters.placement import Placement, explicit
from treeattn.collectives.schedule import Schedule
from treeattn.collectives.traffic import messages
from treeattn.errors import ArgumentError

__all__ = ["Flight", "Payload", "Simulation", "Step", "Traffic", "simulate"]


@dataclass(frozen=True, slots=True)
class Payload:
    """What a rank brings: `records` records of `record_bytes` bytes, never cut within `group` of them."""

    records: int = 16
    record_bytes: int = 520
    group: int = 1

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.records * self.record_bytes


@dataclass(slots=True, eq=False)
class Flight:
    """One message, and when what happened to it, in microseconds.

    ready: the sender has paid for it; began: the sender's ports are free; landing: the receiver's are;
    landed: its last byte is there; taken up and done: the receiver's overhead and merge. after: who kept
    the receiver busy until it was taken up, None for what the receiver did itself.
    """

    round: int
    src: int
    dst: int
    bytes: int
    merge: bool
    tier: int
    ready: float = 0.0
    began: float = 0.0
    landing: float = 0.0
    landed: float = 0.0
    taken_up: float = 0.0
    done: float = 0.0
    after: Flight | None = None


@dataclass(slots=True, eq=False)
class Step:
    """A round in which a rank has something to do: it enters, has sent, has finished."""

    round: int
    sends: list[Flight] = field(default_factory=list)
    arrivals: int = 0
    entered: float = -1.0
    sent: float = 0.0
    ended: float = -1.0
    last: Flight | None = None  # the arrival that it took up last


@dataclass(frozen=True, slots=True)
class Traffic:
    """Messages and bytes on one tier."""

    tier: str
    messages: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Simulation:
    """One step, in microseconds. ends: when each rank has its result; steps: of each rank, in order.

    bound: what no schedule could be faster than on this cluster, by `bound.lower_bound`.
    """

    schedule: Schedule
    cluster: Cluster
    places: Placement
    executor: Executor
    time: float
    bound: float
    starts: tuple[float, ...]
    ends: tuple[float, ...]
    steps: tuple[tuple[Step, ...], ...]
    traffic: tuple[Traffic, ...]
    busiest_card: int

    @property
    def flights(self) -> Iterator[Flight]:
        """All messages."""
        return (flight for steps in self.steps for step in steps for flight in step.sends)


def simulate(
    schedule: Schedule,
    cluster: Cluster,
    places: Placement,
    payload: Payload = Payload(),
    executor: str | None = None,
    starts: Sequence[float] | None = None,
) -> Simulation:
    """One step of `schedule` with rank r at ``places[r]``. starts: when each rank begins, by default all at
    0.

    Raises `ArgumentError` for a placement that does not fit, or an executor that the cluster has not.
    """
    if len(places) != schedule.size:
        raise ArgumentError(f"placement: {len(places)} places for {schedule.size} ranks; give one for each")
    run = _Run(schedule, cluster, explicit(cluster, places), payload, cluster.runs(executor))
    begin = tuple(starts) if starts is not None else (0.0,) * schedule.size
    run.go(begin)
    ends = tuple(steps[-1].ended if steps else start for start, steps in zip(begin, run.steps, strict=True))
    bound = lower_bound(cluster, run.places, payload.bytes, run.executor, schedule.result == "replicated")
    return Simulation(
        schedule, cluster, run.places, run.executor, max(ends), min(begin) + bound, begin, ends,
        tuple(map(tuple, run.steps)), run.traffic(), run.busiest_card(),
    )  # fmt: skip


# A port: its tier or kind, whose it is, 0 out of there or 1 in, and both ends where each pair has a link.
_Taken = tuple[tuple[int, ...], float]
_CARD, _UPLINK, _SHARED = -1, -2, -1000


class _Run:
    """The clocks, the ports and the queue of events of one simulation."""

    def __init__(
        self, schedule: Schedule, cluster: Cluster, places: Placement, payload: Payload, executor: Executor
    ) -> None:
        self.cluster, self.places, self.executor = cluster, places, executor
        self.steps: list[list[Step]] = [[] for _ in range(schedule.size)]
        for message in messages(schedule, payload.records, payload.group):
            tier = cluster.tier_between(places[message.src], places[message.dst])
            size = message.records * payload.record_bytes
            flight = Flight(message.round, message.src, message.dst, size, message.merge, tier)
            self._step(message.src, message.round).sends.append(flight)
            self._step(message.dst, message.round).arrivals += 1
        self.at = [0] * schedule.size  # which of its steps a rank is in
        self.busy = [0.0] * schedule.size  # until when a rank's processor is
        self.free: defaultdict[tuple[int, ...], float] = defaultdict(float)  # when a port is
        self.early: defaultdict[tuple[int, int], list[Flight]] = defaultdict(list)  # landed too soon
        self.held: defaultdict[tuple[int, int], list[Flight]] = defaultdict(list)  # waits for the receiver
        self.events: list[tuple[float, int, Flight, bool]] = []
        self.order = count()
        self.link = lru_cache(None)(lambda tier, size: cluster.link(tier, size, executor.pulls))

    def _step(self, rank: int, round_: int) -> Step:
        if not self.steps[rank] or self.steps[rank][-1].round != round_:
            self.steps[rank].append(Step(round_))
        return self.steps[rank][-1]

    def go(self, starts: Sequence[float]) -> None:
        for rank, start in enumerate(starts):
            self._advance(rank, start + self.executor.call)
        while self.events:
            now, _, flight, landed = heapq.heappop(self.events)
            if landed:
                self._arrive(flight)
            else:
                self._depart(flight, now)

    def _advance(self, rank: int, now: float) -> None:
        """The rank goes on at `now`, through all steps for which everything has arrived."""
        while (step := self._now_in(rank)) is not None:
            self._enter(rank, step, now)
            for flight in self.early.pop((rank, step.round), ()):
                self._take_up(flight, step)
            if step.arrivals:
                return
            now = self._end(rank, step)

    def _enter(self, rank: int, step: Step, now: float) -> None:
        """The step begins with all that it sends."""
        step.entered = now
        now += self.executor.round
        for flight in step.sends:
            now += self.link(flight.tier, flight.bytes).overhead + self.executor.message
            flight.ready = now
            self._send(flight)
        step.sent = self.busy[rank] = now
        for flight in self.held.pop((rank, step.round), ()):
            self._push(max(flight.ready, step.entered), flight, False)

    def _send(self, flight: Flight) -> None:
        receiver = self._now_in(flight.dst)
        there = receiver is not None and receiver.round == flight.round and receiver.entered >= 0
        if self.link(flight.tier, flight.bytes).waits and not there:
            self.held[flight.dst, flight.round].append(flight)
        else:
            self._push(flight.ready, flight, False)

    def _now_in(self, rank: int) -> Step | None:
        steps = self.steps[rank]
        return steps[self.at[rank]] if self.at[rank] < len(steps) else None

    def _push(self, when: float, flight: Flight, landed: bool) -> None:
        heapq.heappush(self.events, (when, next(self.order), flight, landed))

    def _depart(self, flight: Flight, now: float) -> None:
        """Through the sender's ports and the receiver's; each is taken for the bytes, or the gap."""
        link = self.link(flight.tier, flight.bytes)
        out, into = self._ports(flight, link)
        now = self._through_shared(flight, now)
        flight.began = max(now, *(self.free[port] for port, _ in out))
        for port, taken in out:
            self.free[port] = flight.began + taken
        flight.landing = max(flight.began + link.latency, *(self.free[port] for port, _ in into))
        for port, taken in into:
            self.free[port] = flight.landing + taken
        uplinks = (taken for port, taken in (*out, *into) if port[0] <= _UPLINK)
        flight.landed = flight.landing + max(flight.bytes * link.byte, *uplinks, 0.0)
        self._push(flight.landed, flight, True)

    def _through_shared(self, flight: Flight, now: float) -> float:
        """When it is through what all messages of its tier share; that is before its ports, not with them."""
        shared = self.cluster.shared(flight.tier, flight.bytes)
        if not shared:
            return now
        unit = (_SHARED, flight.tier, self.places[flight.src] // self.cluster.widths[flight.tier])
        self.free[unit] = max(now, self.free[unit]) + shared
        return self.free[unit]

    def _ports(self, flight: Flight, link: Link) -> tuple[list[_Taken], list[_Taken]]:
        """(port, microseconds that it is taken) of the sender's side and of the receiver's."""
        cluster, tier = self.cluster, flight.tier
        here, there = self.places[flight.src], self.places[flight.dst]
        taken = max(link.gap, flight.bytes * link.byte)
        sides: tuple[list[_Taken], list[_Taken]] = ([], [])
        if tier <= cluster.node_tier:
            link_of = (here, there) if cluster.tiers[tier].mesh else ()
            sides[0].append(((tier, here, 0, *link_of), taken))
            sides[1].append(((tier, there, 1, *link_of), taken))
            return sides
        for side, place in enumerate((here, there)):
            sides[side].append(((_CARD, self._card(place), side), taken))
            for outer in range(cluster.node_tier + 1, tier + 1):
                if taper := cluster.tiers[outer].taper:
                    width = cluster.widths[outer - 1]
                    cards = width // cluster.slots * cluster.cards
                    share = flight.bytes * link.byte * taper / cards
                    sides[side].append(((_UPLINK - outer, place // width, side), share))
        return sides

    def _card(self, place: int) -> int:
        node, slot = divmod(place, self.cluster.slots)
        return node * self.cluster.cards + slot * self.cluster.cards // self.cluster.slots

    def _arrive(self, flight: Flight) -> None:
        step = self._now_in(flight.dst)
        if step is None or step.round != flight.round or step.entered < 0:
            self.early[flight.dst, flight.round].append(flight)
            return
        self._take_up(flight, step)
        if not step.arrivals:
            self._advance(flight.dst, self._end(flight.dst, step))

    def _take_up(self, flight: Flight, step: Step) -> None:
        """The receiver pays for it, and merges."""
        rank = flight.dst
        flight.taken_up = max(flight.landed, self.busy[rank])
        flight.after = step.last if self.busy[rank] > flight.landed else None
        cost = self.link(flight.tier, flight.bytes).overhead + self.executor.message
        if flight.merge:
            cost += flight.bytes * 1e-3 / self.executor.merge_bandwidth
        flight.done = self.busy[rank] = flight.taken_up + cost
        step.last = flight
        step.arrivals -= 1

    def _end(self, rank: int, step: Step) -> float:
        step.ended = step.sent if step.last is None else step.last.done
        self.at[rank] += 1
        return step.ended

    def traffic(self) -> tuple[Traffic, ...]:
        """Messages and bytes of each tier, from the inside out."""
        found = [[0, 0] for _ in self.cluster.tiers]
        for step in (step for steps in self.steps for step in steps):
            for flight in step.sends:
                found[flight.tier][0] += 1
                found[flight.tier][1] += flight.bytes
        return tuple(
            Traffic(tier.name, *counted) for tier, counted in zip(self.cluster.tiers, found, strict=True)
        )

    def busiest_card(self) -> int:
        """Bytes that the network card which sends most of them sends; 0 within one node."""
        sent: defaultdict[int, int] = defaultdict(int)
        for rank, steps in enumerate(self.steps):
            far = (f for step in steps for f in step.sends if f.tier > self.cluster.node_tier)
            sent[self._card(self.places[rank])] += sum(flight.bytes for flight in far)
        return max(sent.values(), default=0)
