"""The fastest of a few schedules, by simulation on the machine of a job: what ``scheme="auto"`` means.

Rank 0 prices every candidate on the cluster of ``auto:cluster=FILE`` (or a shipped name), else of the
variable ``TREEATTN_CLUSTER``, else on what is detected, whose prices are assumed; all ranks are told the
fastest, and why.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from treeattn import communicators, topology
from treeattn.agreement import collectively
from treeattn.collectives import catalog
from treeattn.collectives.catalog import Selection
from treeattn.collectives.clusters.description import Cluster
from treeattn.collectives.clusters.levels import Nested, nested
from treeattn.collectives.clusters.placement import Placement, node_groups
from treeattn.collectives.clusters.simulate import simulate
from treeattn.collectives.clusters.uncertainty import half_off
from treeattn.collectives.runtime.communicator import Communicator
from treeattn.collectives.schedule import Result, Schedule
from treeattn.collectives.traffic import Payload
from treeattn.errors import ArgumentError, RestrictionError

_CANDIDATES = (
    "recursive_doubling", "k_nomial_tree", "k_nomial_tree:radix=4", "double_binary_tree", "bine",
    "reduce_scatter_gather", "reduce_scatter_gather:order=near", "circulant", "hierarchical",
    "hierarchical:inner=k_nomial_tree", "hierarchical:inner=(k_ary_tree:radix=8)",
    "split_rail", "multi_leader",
)  # fmt: skip
# Of p * p messages: priced where that is soon done.
_DENSE, _DENSE_RANKS = ("all_gather_merge", "ring", "recursive_multiplying"), 64


class Choice(NamedTuple):
    """What was chosen, and why in a line."""

    schedule: Schedule
    why: str


def candidates(size: int) -> tuple[str, ...]:
    """What is priced for so many ranks."""
    return (*_CANDIDATES, *(_DENSE if size <= _DENSE_RANKS else ()))


def choose(
    comm: Communicator,
    asked: Selection,
    payload: Payload,
    executor: str | None = None,
    result: Result = "replicated",
) -> Choice:
    """The fastest schedule for the payload by this executor, or the cluster's own where it has no prices of
    it, with its result where `result` says. Collective. Raises what reading the cluster raises, and
    `ArgumentError` for more ranks than it has places, on every rank alike."""
    nodes, found = communicators.node_groups(comm), topology.detect(comm)
    given = dict(asked.given).get("cluster")
    wanted = given if isinstance(given, str) else None

    def decide() -> tuple[Nested, str] | None:
        return None if comm.rank else _fastest(wanted, found, nodes, payload, executor, result)

    chosen, why = comm.bcast(collectively(comm, decide))
    return Choice(_build(chosen, comm.size, result), why)


def _fastest(
    wanted: str | None,
    found: topology.Topology,
    nodes: tuple[tuple[int, ...], ...],
    payload: Payload,
    executor: str | None,
    result: Result,
) -> tuple[Nested, str]:
    """(scheme with the groups of ranks that shape it, why)."""
    cluster, places, by = _where(wanted, found)
    runs, lacking = _runs(cluster, places, executor)
    flat = (Nested(text, nodes, cluster.node) for text in candidates(len(places)))
    deeper = nested(cluster, places) if node_groups(cluster, places) == nodes else ()
    times = {}
    for one in (*flat, *deeper):
        try:
            schedule = _build(one, len(places), result)
        except RestrictionError:
            continue
        times[one] = simulate(schedule, cluster, places, payload, runs).time
    first, *others = sorted(times, key=times.__getitem__)
    time = f"{times[first]:.1f} µs, half of such off by {half_off(cluster):.0%},"
    what = f"{_called(first, nodes)}, {time} for {payload.bytes:,} bytes by {runs}{lacking}"
    second = next((one for one in others if times[one] > times[first]), None)
    after = f"; next {_called(second, nodes)}, {times[second]:.1f}" if second else ""
    return first, f"{what} on {cluster.name} ({cluster.about}){by}{after}"


def _runs(cluster: Cluster, places: Placement, executor: str | None) -> tuple[str, str]:
    """The executor whose prices are taken, and whose are lacking."""
    try:
        return cluster.executor_for(places, executor), ""
    except ArgumentError:
        return cluster.executor_for(places), f" (no prices of {executor})"


def _called(one: Nested, nodes: Any) -> str:
    return one.text if one.groups == nodes else f"{one.text} over each {one.tier}"


def _where(wanted: str | None, found: topology.Topology) -> tuple[Cluster, Placement, str]:
    """The cluster, the places of ranks, and who named it and how well it fits."""
    named = topology.described(wanted, "auto:cluster=")
    if named is None:
        loose = any(rank.socket is None and rank.sockets for rank in found.ranks)
        return *found.cluster(), f"; {found.binding}" if loose else ""
    misfit = found.misfit(named.cluster)
    by = f", named by {named.by}" + (f"; {misfit}" if misfit else "")
    return named.cluster, found.places_on(named.cluster), by


def _build(one: Nested, size: int, result: Result) -> Schedule:
    asked = catalog.select(one.text)
    return asked.build(size, one.groups if asked.needs_nodes else None, result)
