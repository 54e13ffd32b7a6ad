"""Laws of the simulator on drawn clusters and drawn schedules: what a change of prices may change.

Ranks start at drawn instants and messages have drawn sizes, so that hardly any two events are simultaneous:
which of those comes first is arbitrary, and a price of 1e-6 would rightly decide it.

Exact: the same with rates and sizes scaled together. Ports only delay: no message is earlier than on a
cluster where none is ever taken, whatever else is contended. (That a further port makes nothing faster does
not hold: another order of arrivals may help a later message, as in list scheduling; Graham, "Bounds on
multiprocessing timing anomalies", SIAM J. Appl. Math. 17, 1969.)
"""

import random

import pytest
from made_clusters import two_tiers
from msgspec.structs import replace

from treeattn.collectives import Schedule, Transfer
from treeattn.collectives.clusters.description import Cluster, Executor, Protocol, Tier
from treeattn.collectives.clusters.simulate import simulate
from treeattn.collectives.schedule import Payload

CHUNKS = 1000

DRAWN = [
    0,
    *(pytest.param(first, marks=pytest.mark.slow) for first in range(20, 160, 20)),
    *(pytest.param(first, marks=pytest.mark.deep) for first in range(160, 500, 20)),
]
of_drawn = pytest.mark.parametrize("first", DRAWN)


class Case:
    """A cluster with every resource that there is, ranks on some of its places, and a bag of messages."""

    def __init__(self, seed):
        self.draw = draw = random.Random(seed)
        joins = [draw.randint(1, 4), draw.randint(2, 4), *(draw.randint(2, 3) for _ in range(2))]
        node = draw.randint(0, 1)
        slots = joins[0] * (joins[1] if node else 1)
        tiers = tuple(self._tier(f"t{at}", count, at > node) for at, count in enumerate(joins))
        cards = draw.choice([count for count in range(1, slots + 1) if slots % count == 0])
        executor = Executor(draw.uniform(0, 3), draw.uniform(0, 1), draw.uniform(1, 20), draw.uniform(0, 0.5))
        self.cluster = Cluster("drawn", "", f"t{node}", tiers, {"e": executor}, "e", cards)
        self.places = tuple(
            draw.sample(range(self.cluster.places), draw.randint(2, min(24, self.cluster.places)))
        )
        ranks = range(len(self.places))
        rounds = tuple(
            tuple(self._transfer(*draw.sample(ranks, 2)) for _ in range(draw.randint(1, 2 * len(ranks))))
            for _ in range(draw.randint(1, 4))
        )
        self.schedule = Schedule("drawn", len(ranks), CHUNKS, rounds)
        self.payload = Payload(CHUNKS, draw.randint(1, 64))
        starts = [draw.uniform(0, 20) for _ in ranks]
        self.starts = [start - min(starts) for start in starts]  # as times count, from the first on

    def _tier(self, name, joins, outer):
        draw = self.draw
        latency, bandwidth = draw.uniform(0.5, 10), draw.uniform(0.5, 20)
        protocol = Protocol("long", draw.randint(1, 20_000), 2 * latency, bandwidth / 2, draw.random() < 0.5)
        return Tier(
            name, joins, latency, draw.uniform(0.05, 1), draw.uniform(0, 1), bandwidth,
            mesh=not outer and draw.random() < 0.3,
            taper=draw.choice([0.0, draw.uniform(0.5, 8)]) if outer else 0.0,
            shared_gap=draw.choice([0.0, draw.uniform(0, 1)]),
            shared_bandwidth=draw.choice([None, draw.uniform(1, 50)]),
            protocols=draw.choice([(), (protocol,)]),
        )  # fmt: skip

    def _transfer(self, src, dst):
        begin = self.draw.randrange(CHUNKS)
        chunks = range(begin, self.draw.randint(begin + 1, CHUNKS))
        return Transfer(src, dst, chunks, self.draw.random() < 0.7)

    def run(self, cluster=None, places=None, payload=None):
        return simulate(
            self.schedule, cluster or self.cluster, places or self.places, payload or self.payload,
            starts=self.starts,
        )  # fmt: skip


def tiers(cluster, **fields):
    """The cluster with `fields` in each tier; what is callable is given the tier's own value."""
    return replace(
        cluster,
        tiers=tuple(
            replace(t, **{n: v(getattr(t, n)) if callable(v) else v for n, v in fields.items()})
            for t in cluster.tiers
        ),
    )


def times(factor):
    return lambda value: value if value is None else value * factor


@of_drawn
def test_sizes_and_rates_scaled_together_change_no_time(first):
    for seed in range(first, first + 20):
        case = Case(seed)
        more = times(4)  # a power of two: no rounding
        scaled = tiers(
            case.cluster,
            bandwidth=more,
            shared_bandwidth=more,
            protocols=lambda steps: tuple(
                replace(step, from_bytes=4 * step.from_bytes, bandwidth=4 * step.bandwidth) for step in steps
            ),
        )
        executor = replace(
            case.cluster.executors["e"], merge_bandwidth=4 * case.cluster.executors["e"].merge_bandwidth
        )
        scaled = replace(scaled, executors={"e": executor})
        payload = Payload(CHUNKS, 4 * case.payload.record_bytes)
        assert case.run(scaled, payload=payload).ends == case.run().ends, seed


def alone(case):
    """Landing and end of every message and rank where no port is ever taken: by recursion over the rounds,
    apart from the simulator. Messages in the order of the schedule."""
    cluster, executor = case.cluster, case.cluster.executors["e"]
    now = [start + executor.call for start in case.starts]
    for in_round in case.schedule.rounds:
        busy = {rank for t in in_round for rank in (t.src, t.dst)}
        clock = {rank: now[rank] + executor.round for rank in busy}
        landed = []
        for t in in_round:
            size = (t.chunks.stop - t.chunks.start) * case.payload.record_bytes
            tier = cluster.tier_between(case.places[t.src], case.places[t.dst])
            link = cluster.link(tier, size)
            clock[t.src] += link.overhead + executor.message
            ready = max(clock[t.src], now[t.dst] if link.waits else 0.0)
            merge = size * 1e-3 / executor.merge_bandwidth if t.merge else 0.0
            landed.append(
                (ready + link.latency + size * link.byte, t.dst, link.overhead + executor.message + merge)
            )
        yield [when for when, *_ in landed]
        for when, rank, cost in sorted(landed):
            clock[rank] = max(clock[rank], when) + cost
        for rank in busy:
            now[rank] = clock[rank]
    sends = {rank for in_round in case.schedule.rounds for t in in_round for rank in (t.src, t.dst)}
    yield [now[rank] if rank in sends else start for rank, start in enumerate(case.starts)]


@of_drawn
def test_ports_only_delay(first):
    for seed in range(first, first + 20):
        case = Case(seed)
        found, bounds = case.run(), list(alone(case))
        landed = {}
        for flight in found.flights:
            landed.setdefault((flight.round, flight.src, flight.dst), []).append(flight.delivered)
        for number, (in_round, least) in enumerate(zip(case.schedule.rounds, bounds, strict=False)):
            for transfer, bound in zip(in_round, least, strict=True):
                assert landed[number, transfer.src, transfer.dst].pop(0) >= bound - 1e-9, seed
        assert all(end >= bound - 1e-9 for end, bound in zip(found.ends, bounds[-1], strict=True)), seed


def test_a_message_holds_no_port_while_it_waits_for_another():
    """0, 1 and 2 wait for the NIC of 4; 3 -> 7 uses none of what they wait for."""
    messages = tuple(Transfer(src, dst) for src, dst in ((0, 4), (1, 4), (2, 4), (3, 7)))
    schedule = Schedule("made", 8, 1, (messages,))
    for taper in (0.0, 1e-6):
        cluster = two_tiers(2, 4, between=1.0, bandwidth=1.0)
        node, net = cluster.tiers
        groups = Tier("group", 4, 1.0, 0.0, 0.0, 1.0)
        node = replace(node, joins=1)
        cluster = replace(cluster, tiers=(node, groups, replace(net, taper=taper)), node="node", cards=1)
        found = simulate(schedule, cluster, tuple(range(8)), Payload(1, 10_000))
        landed = {(flight.src, flight.dst): flight.delivered for flight in found.flights}
        assert landed[3, 7] == pytest.approx(11, abs=1e-3)
        assert landed[2, 4] == pytest.approx(31, abs=1e-3)


def test_a_sender_that_waits_for_its_receiver_does_not_begin_before_it():
    """The receiver of a long message is still merging when its sender is ready: it begins once that ends."""
    early, late = Transfer(2, 1), Transfer(3, 0, range(1), False)
    schedule = Schedule("made", 4, 1, ((early, late), (Transfer(0, 1, range(1), False),)))
    cluster = two_tiers(4, 1, between=1.0, protocols=(Protocol("long", 1, 1.0, None, True),))
    cluster = replace(cluster, executors={"free": Executor(0.0, 0.0, 1.0)})
    found = simulate(schedule, cluster, (0, 1, 2, 3), Payload(1, 100_000), starts=(0.0, 0.0, 0.0, 4.0))
    message = next(flight for flight in found.flights if flight.round == 1)
    assert message.delivered == pytest.approx(1 + 100 + 1)
