"""Schedules for a machine: the catalogue searched through, with all its parameters and ranks reordered.

Every candidate is proved by the checker and priced by the simulator. Three things count: time, bytes of the
busiest NIC, and how identical bits come about (class A needs less of an executor than class C). What is not
beaten in all three is the Pareto front.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from math import isqrt
from typing import NamedTuple

from treeattn.collectives.catalog import select
from treeattn.collectives.check import check
from treeattn.collectives.clusters.critical_path import Cost, cost
from treeattn.collectives.clusters.description import Cluster
from treeattn.collectives.clusters.placement import Placement, node_groups, suited
from treeattn.collectives.clusters.simulate import simulate
from treeattn.collectives.combinators import on_ranks
from treeattn.collectives.schedule import Payload, Schedule
from treeattn.errors import RestrictionError, ScheduleError

#: Candidates of more are left alone: they would take longer to price than all others together.
MOST_TRANSFERS = 40_000


class Machine(NamedTuple):
    """What schedules are made for: ranks at these places, reducing this."""

    cluster: Cluster
    places: Placement
    payload: Payload
    executor: str | None = None


class Priced(NamedTuple):
    """A proved schedule. name: scheme string, or what it was made from; microseconds, and of what they are
    paid; bytes of the busiest network card; bits: "A" or "C"."""

    name: str
    schedule: Schedule
    time: float
    cost: Cost
    max_nic_bytes: int
    bits: str

    @property
    def criteria(self) -> tuple[float, int, str]:
        """What counts, each the less the better."""
        return self.time, self.max_nic_bytes, self.bits

    def beats(self, other: Priced) -> bool:
        """Nowhere worse, and somewhere better."""
        worse = self.time > other.time or self.max_nic_bytes > other.max_nic_bytes or self.bits > other.bits
        return self.criteria != other.criteria and not worse


def search(machine: Machine, say: Callable[[str], object] = lambda _: None) -> tuple[list[Priced], list[str]]:
    """Every candidate, the fastest first, each also with its ranks reordered to suit the places; and those
    that have too many transfers. say: called with how far it is."""
    found: list[Priced] = []
    left: list[str] = []
    groups = node_groups(machine.cluster, machine.places)
    for text in candidates(len(machine.places), len(groups), max(map(len, groups))):
        asked = select(text)
        try:
            schedule = asked.build(len(machine.places), groups)
        except RestrictionError:
            continue
        if schedule.messages > MOST_TRANSFERS:
            left.append(text)
            continue
        say(f"priced {len(found)} candidates; now {asked.text}")
        found.append(priced(machine, asked.text, schedule))
        if not asked.needs_nodes and len(groups) > 1:
            found.append(priced(machine, f"{asked.text}, reordered", _reordered(machine, schedule)))
    return sorted(found, key=lambda one: one.criteria), left


def priced(machine: Machine, name: str, schedule: Schedule) -> Priced:
    """Proved and simulated. Raises `ScheduleError`, also where ranks may end with other bits."""
    bits = check(schedule).determinism
    if bits == "none" or schedule.result != "replicated":
        raise ScheduleError(f"{name}: ranks do not end with one result")
    found = simulate(schedule, machine.cluster, machine.places, machine.payload, machine.executor)
    return Priced(name, schedule, found.time, cost(found), found.max_nic_bytes, bits)


def front(found: Iterable[Priced]) -> list[Priced]:
    """What no other beats, the fastest first; of equals the first."""
    kept: dict[tuple[float, int, str], Priced] = {}
    everyone = list(found)
    for one in everyone:
        if not any(other.beats(one) for other in everyone):
            kept.setdefault(one.criteria, one)
    return sorted(kept.values(), key=lambda one: one.time)


def _reordered(machine: Machine, schedule: Schedule) -> Schedule:
    """The ranks of the schedule become those that sit where `suited` would put them."""
    wanted = suited(machine.cluster, schedule)
    order = sorted(range(schedule.size), key=wanted.__getitem__)
    sits = sorted(range(schedule.size), key=machine.places.__getitem__)
    becomes = dict(zip(order, sits, strict=True))
    ranks = [becomes[rank] for rank in range(schedule.size)]
    return replace(schedule, rounds=on_ranks(schedule.rounds, ranks))


# Of `candidates`.
_RADICES = (2, 3, 4, 8, 16)
_CHUNKS = (1, 2, 4, 8)
_LEADERS = (2, 4, 8)
_MOST_FACTORISATIONS = 48  # of one number: beyond, those of ascending factors alone


def candidates(ranks: int, nodes: int, widest: int) -> Iterator[str]:
    """For so many ranks on so many nodes, of which the widest has `widest`. Some may refuse what they get."""
    yield from _flat(ranks)
    if nodes == 1 or widest == 1:
        return
    across = list(_across(nodes))
    inner = ("chain", *_trees(widest))
    yield from (f"hierarchical:inner=({tree}):outer=({outer})" for tree in inner for outer in across)
    for rail in across:
        yield f"split_rail:rail=({rail})"
        yield f"uneven_nodes:rail=({rail})"
        yield from (f"multi_leader:leaders={n}:rail=({rail})" for n in _LEADERS if n < widest)


def _flat(ranks: int) -> Iterator[str]:
    yield from ("recursive_doubling", "reduce_scatter_gather", "reduce_scatter_gather:order=near")
    yield from ("bine", "bine:form=bandwidth", "circulant", "elimination", "all_gather_trees")
    yield from ("all_gather_merge", "ring", "chain", "logp_optimal")
    yield from (f"double_binary_tree:chunks={chunks}" for chunks in _CHUNKS)
    yield from _trees(ranks)
    yield from _multiplying(ranks)


def _trees(ranks: int) -> Iterator[str]:
    for radix in _RADICES:
        if radix <= max(ranks, 2):
            yield f"k_nomial_tree:radix={radix}"
            yield f"k_ary_tree:radix={radix}"


def _across(nodes: int) -> Iterator[str]:
    """Over one rank of each node, or along a rail."""
    yield from ("recursive_doubling", "reduce_scatter_gather", "ring", "all_gather_merge", "bine")
    yield from (f"k_nomial_tree:radix={radix}" for radix in _RADICES if radix <= max(nodes, 2))
    yield from _multiplying(nodes)


def _multiplying(ranks: int) -> Iterator[str]:
    found = list(factorisations(ranks))
    if len(found) > _MOST_FACTORISATIONS:
        found = [factors for factors in found if list(factors) == sorted(factors)]
    for factors in found:
        if len(factors) > 1 and max(factors) > 2:  # the others are all_gather_merge and recursive_doubling
            yield f"recursive_multiplying:factors={'+'.join(map(str, factors))}"


def factorisations(number: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `number` as a product, in every order; the number alone is the first."""
    yield (number,)
    divisors = {d for low in range(2, isqrt(number) + 1) if number % low == 0 for d in (low, number // low)}
    for first in sorted(divisors):
        for rest in factorisations(number // first):
            yield (first, *rest)
