"""Simulates what a schedule costs on a described cluster: every transfer it makes, one clock for each rank.

A rank enters a round when it has finished the one before (rounds are no barriers). It pays the executor for
the round, then the overhead of each message that it sends. A message passes one port after the other on the
sender's side, is under way for the tier's latency, and passes those of the receiver's side; the receiver,
once its own are sent, pays overhead and merge for one arrival after the other. Ports: of the rank, of the
pair on a mesh, of the NIC that ranks of a node share, of tapered uplinks, and of what a whole tier shares.

A port serves messages in the order in which they come to it, for as long as their bytes take there (or its
gap), and is free otherwise: a message that waits for the next port holds none before it. A message goes on to
the next port as soon as this one takes it (cut-through), and is delivered when its last byte is through all.

Source: LogGP (Alexandrov et al., SPAA 1995), simulated event by event as LogGOPSim does (Hoefler,
Schneider, Lumsdaine, HPDC 2010), with ports in place of one gap.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from typing import NamedTuple

from treeattn.collectives.clusters.bound import lower_bound
from treeattn.collectives.clusters.description import Cluster, Executor
from treeattn.collectives.clusters.placement import Placement, explicit
from treeattn.collectives.schedule import Payload, Schedule
from treeattn.errors import ArgumentError

_ONE_TOKEN = Payload()  # of 16 heads of 128


@dataclass(slots=True, eq=False)
class MessageEvent:
    """One message, and when what happened to it, in microseconds.

    ready: the sender has paid for it; began: the last of the sender's ports takes it; last_port: the last of
    the receiver's does; delivered: its last byte is there; recv_start, recv_done: around the receiver's
    overhead and merge.
    after: the message that kept the receiver busy until then, None for what the receiver did itself.
    """

    round: int
    src: int
    dst: int
    bytes: int
    merge: bool
    tier: int
    ready: float = 0.0
    began: float = 0.0
    last_port: float = 0.0
    delivered: float = 0.0
    recv_start: float = 0.0
    recv_done: float = 0.0
    after: MessageEvent | None = None


@dataclass(slots=True, eq=False)
class Step:
    """A round in which a rank has something to do: it enters, has sent, has finished. far: with messages
    between nodes."""

    round: int
    sends: list[MessageEvent] = field(default_factory=list)
    arrivals: int = 0
    entered: float = -1.0
    sent: float = 0.0
    ended: float = -1.0
    far: bool = False
    last: MessageEvent | None = None  # the arrival that it took up last


@dataclass(slots=True)
class Traffic:
    """Messages and bytes on one tier."""

    tier: str
    messages: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Simulation:
    """One step, in microseconds from the first rank's entry on. starts: when each rank enters; ends: when it
    has its result; steps: of each rank, in order.

    bound: what no schedule could be faster than on this cluster, by `bound.lower_bound`."""

    schedule: Schedule
    cluster: Cluster
    places: Placement
    executor: str
    time: float
    bound: float
    starts: tuple[float, ...]
    ends: tuple[float, ...]
    steps: tuple[tuple[Step, ...], ...]
    traffic: tuple[Traffic, ...]
    max_nic_bytes: int

    @property
    def prices(self) -> Executor:
        """The prices of the executor that was simulated."""
        return self.cluster.executors[self.executor]

    @property
    def flights(self) -> Iterator[MessageEvent]:
        """All messages, rank by rank in the order in which they were sent."""
        return (flight for steps in self.steps for step in steps for flight in step.sends)


def simulate(
    schedule: Schedule,
    cluster: Cluster,
    places: Placement,
    payload: Payload = _ONE_TOKEN,
    executor: str | None = None,
    starts: Sequence[float] | None = None,
) -> Simulation:
    """One step of `schedule` with rank r at ``places[r]``. starts: when each rank begins, in microseconds
    from any instant on; all at once unless given.

    Raises `ArgumentError` for a placement that does not fit, or an executor that the cluster has not.

    >>> from treeattn.collectives.clusters import description, placement
    >>> cluster = description.load("laptop")
    >>> schedule = collectives.build("binary_tree", 4)
    >>> predicted = simulate(schedule, cluster, placement.block(cluster, 4))
    >>> 0 < predicted.bound <= predicted.time  # microseconds
    True
    """
    if len(places) != schedule.size:
        raise ArgumentError(f"placement: {len(places)} places for {schedule.size} ranks; give one for each")
    name = cluster.executor_for(places, executor)
    run = _Run(schedule, cluster, explicit(cluster, places), payload, cluster.executors[name])
    first = min(starts or [0.0])
    begin = tuple(start - first for start in starts or [0.0] * schedule.size)
    run.go(begin)
    ends = tuple(steps[-1].ended if steps else start for start, steps in zip(begin, run.steps, strict=True))
    replicated = schedule.result == "replicated"
    bound = lower_bound(cluster, run.places, payload.bytes, run.executor, replicated)
    return Simulation(
        schedule, cluster, run.places, name, max(ends), bound, begin, ends,
        tuple(map(tuple, run.steps)), tuple(run.traffic), max(run.nic_bytes.values(), default=0),
    )  # fmt: skip


# A port: its tier or kind, its place, which way, and the other end where each pair has a link.
_NIC, _UPLINK, _SHARED = -1, -2, -1000
_OUT, _IN, _THROUGH = range(3)


class _PortUse(NamedTuple):
    """A port on a message's way: how long it is taken, what the bytes take, and the way on to the next."""

    port: tuple[int, ...]
    taken: float
    bytes: float
    onward: float = 0.0


#: A message on its way: when and in which order of events, the ports that it passes, at which of them it
#: comes next, and when its last byte is there at the earliest.
_Hop = tuple[float, int, MessageEvent, list[_PortUse], int, float]


class _Run:
    """The clocks, the ports and the queue of events of one simulation."""

    def __init__(
        self, schedule: Schedule, cluster: Cluster, places: Placement, payload: Payload, executor: Executor
    ) -> None:
        self.cluster, self.places, self.executor = cluster, places, executor
        self.steps: list[list[Step]] = [[] for _ in range(schedule.size)]
        self.traffic = [Traffic(tier.name) for tier in cluster.tiers]  # from the inside out
        self.nic_bytes: Counter[int] = Counter()  # that each network card sends
        for round_, src, dst, records, merge in schedule.traffic(payload.records, payload.group):
            tier, size = cluster.tier_between(places[src], places[dst]), records * payload.record_bytes
            sender, receiver = self._step(src, round_), self._step(dst, round_)
            sender.sends.append(MessageEvent(round_, src, dst, size, merge, tier))
            receiver.arrivals += 1
            self.traffic[tier].messages += 1
            self.traffic[tier].bytes += size
            if tier > cluster.node_tier:
                sender.far = receiver.far = True
                self.nic_bytes[self._nic(places[src])] += size
        self.at = [0] * schedule.size  # which of its steps a rank is in
        self.busy = [0.0] * schedule.size  # until when a rank's processor is
        self.free: defaultdict[tuple[int, ...], float] = defaultdict(float)  # when a port is
        # By receiver and round: delivered before it is there, and waiting for it to send.
        self.early: defaultdict[tuple[int, int], list[MessageEvent]] = defaultdict(list)
        self.held: defaultdict[tuple[int, int], list[MessageEvent]] = defaultdict(list)
        self.events: list[_Hop] = []
        self.order = count()
        self.unfinished = sum(map(bool, self.steps))
        self.link = lru_cache(None)(lambda tier, size: cluster.link(tier, size, executor.pulls))

    def _step(self, rank: int, round_: int) -> Step:
        if not self.steps[rank] or self.steps[rank][-1].round != round_:
            self.steps[rank].append(Step(round_))
        return self.steps[rank][-1]

    def go(self, starts: Sequence[float]) -> None:
        for rank, start in enumerate(starts):
            self._advance(rank, start + self.executor.call)
        while self.unfinished and self.events:
            hop = heapq.heappop(self.events)
            _, _, flight, stops, at, _ = hop
            if at < len(stops):
                self._pass(hop)
            else:
                self._arrive(flight)

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
        now += self.executor.round + (self.executor.far_round if step.far else 0.0)
        for flight in step.sends:
            now += self.link(flight.tier, flight.bytes).overhead + self.executor.message
            flight.ready = now
            self._send(flight)
        step.sent = self.busy[rank] = now
        for flight in self.held.pop((rank, step.round), ()):
            self._depart(flight, max(flight.ready, step.entered))

    def _send(self, flight: MessageEvent) -> None:
        if not self.link(flight.tier, flight.bytes).waits:
            self._depart(flight, flight.ready)
            return
        receiver = self._now_in(flight.dst)
        if receiver is not None and receiver.round == flight.round and receiver.entered >= 0:
            self._depart(flight, max(flight.ready, receiver.entered))
        else:
            self.held[flight.dst, flight.round].append(flight)

    def _now_in(self, rank: int) -> Step | None:
        steps = self.steps[rank]
        return steps[self.at[rank]] if self.at[rank] < len(steps) else None

    def _depart(self, flight: MessageEvent, now: float) -> None:
        heapq.heappush(self.events, (now, next(self.order), flight, self._stops(flight), 0, 0.0))

    def _pass(self, hop: _Hop) -> None:
        """Through one port, which is taken from then on, to the next, or to its end."""
        now, _, flight, stops, at, tail = hop
        stop = stops[at]
        start = max(now, self.free[stop.port])
        self.free[stop.port] = start + stop.taken
        tail = max(tail, start + stop.bytes) + stop.onward
        if stop.port[2] == _OUT:
            flight.began = start
        last = at + 1 == len(stops)
        if last:
            flight.last_port, flight.delivered = start, tail
        after = tail if last else start + stop.onward
        heapq.heappush(self.events, (after, next(self.order), flight, stops, at + 1, tail))

    def _stops(self, flight: MessageEvent) -> list[_PortUse]:
        """All ports on its way, from the sender to the receiver."""
        link = self.link(flight.tier, flight.bytes)
        here, there = self.places[flight.src], self.places[flight.dst]
        out, into = self._side(flight, here, _OUT, there), self._side(flight, there, _IN, here)
        out[-1] = _PortUse(*out[-1][:3], link.latency)
        return self._shared(flight) + out + into[::-1]

    def _shared(self, flight: MessageEvent) -> list[_PortUse]:
        """What all messages of its tier share: it goes on when it is through with that."""
        shared = self.cluster.shared(flight.tier, flight.bytes)
        unit = self.places[flight.src] // self.cluster.widths[flight.tier]
        return [_PortUse((_SHARED - flight.tier, unit, _THROUGH), shared, 0.0, shared)] if shared else []

    def _side(self, flight: MessageEvent, place: int, side: int, other: int) -> list[_PortUse]:
        """Ports at one end, from the rank outwards."""
        cluster, tier = self.cluster, flight.tier
        link = self.link(tier, flight.bytes)
        taken, size = max(link.gap, flight.bytes * link.byte), flight.bytes * link.byte
        if tier <= cluster.node_tier:
            pair = (other,) if cluster.tiers[tier].mesh else ()
            return [_PortUse((tier, place, side, *pair), taken, size)]
        found = [_PortUse((_NIC, self._nic(place), side), taken, size)]
        for outer in range(cluster.node_tier + 1, tier + 1):
            if taper := cluster.tiers[outer].taper:
                width = cluster.widths[outer - 1]
                share = size * taper / (width // cluster.slots * cluster.cards)
                found.append(_PortUse((_UPLINK - outer, place // width, side), share, share))
        return found

    def _nic(self, place: int) -> int:
        node, slot = divmod(place, self.cluster.slots)
        return node * self.cluster.cards + slot * self.cluster.cards // self.cluster.slots

    def _arrive(self, flight: MessageEvent) -> None:
        step = self._now_in(flight.dst)
        if step is None or step.round != flight.round or step.entered < 0:
            self.early[flight.dst, flight.round].append(flight)
            return
        self._take_up(flight, step)
        if not step.arrivals:
            self._advance(flight.dst, self._end(flight.dst, step))

    def _take_up(self, flight: MessageEvent, step: Step) -> None:
        """The receiver pays for it, and merges."""
        rank = flight.dst
        flight.recv_start = max(flight.delivered, self.busy[rank])
        flight.after = step.last if self.busy[rank] > flight.delivered else None
        cost = self.link(flight.tier, flight.bytes).overhead + self.executor.message
        if flight.merge:
            cost += flight.bytes * 1e-3 / self.executor.merge_bandwidth
        flight.recv_done = self.busy[rank] = flight.recv_start + cost
        step.last = flight
        step.arrivals -= 1

    def _end(self, rank: int, step: Step) -> float:
        step.ended = step.sent if step.last is None else step.last.recv_done
        self.at[rank] += 1
        self.unfinished -= self.at[rank] == len(self.steps[rank])
        return step.ended
