"""What the simulator says of the points of a comparison, on a cluster that is described."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from treeattn import topology
from treeattn.agreement import collectively
from treeattn.attention.shape import DTYPES
from treeattn.collectives.catalog import executor_over
from treeattn.collectives.clusters.description import Cluster
from treeattn.collectives.clusters.disturbance import ALL_TOGETHER, UNDISTURBED, Arrivals, Disturbance
from treeattn.collectives.clusters.placement import Placement
from treeattn.collectives.clusters.simulate import simulate
from treeattn.collectives.runtime.communicator import MpiCommunicator
from treeattn.collectives.schedule import Schedule
from treeattn.collectives.traffic import Payload
from treeattn.errors import ArgumentError, RestrictionError
from treeattn.selection import select
from treeattn.study.compare.schema import NULL, SUM, WIRE_BYTES, Key, members
from treeattn.study.decode_step import (
    Shape,
    attention_time,
    kv_ring_time,
    query_ring_exchange,
    reduction_time,
)
from treeattn.study.intervals import Estimate, Timed, estimates, words


class Predictions(NamedTuple):
    """Of every key that can be predicted, and on which cluster, in words: on rank 0, where one is named."""

    estimates: dict[Key, Estimate]
    shown: str = ""


def predictions(
    world: MpiCommunicator,
    name: str | None,
    keys: Sequence[Key],
    own: Mapping[str, Schedule],
    baseline: str | None = None,
    arrivals: Mapping[str, Arrivals] = ALL_TOGETHER,
) -> Predictions:
    """On the cluster of that name, else the one of TREEATTN_CLUSTER. own: schedules of one's own, by name.
    Ratios are to the baseline, or in each case to the one that is predicted fastest.

    Collective. Raises what reading the cluster raises, on every rank alike.
    """
    found = topology.detect(world)

    def predict() -> Predictions:
        named = topology.described(name) if world.rank == 0 else None
        if named is None:
            return Predictions({})
        cluster, places = named.cluster, found.places_on(named.cluster)
        of_rank = [rank.node for rank in found.ranks]
        known: dict[Key, Estimate] = {}
        without: dict[str, None] = {}
        for _, case in groupby(keys, lambda key: key.case):
            runs: dict[Key, Timed] = {}
            for key in case:
                used = members(of_rank, key.place)
                at = tuple(places[rank] for rank in used)
                nodes = [[used.index(rank) for rank in node if rank in used] for node in found.nodes]
                groups = [node for node in nodes if node]
                if run := timed(cluster, at, groups, key, own, Disturbance(arrivals[key.arrivals])):
                    runs[key] = run
                without[lacking(cluster, at, key)] = None
            drawn = any(arrivals[key.arrivals].drawn for key in runs)
            base = next((at for at, key in enumerate(runs) if key.label == baseline), None)
            known |= zip(runs, estimates(cluster, list(runs.values()), base, drawn), strict=True)
        shown = "; ".join(filter(None, (named.shown, found.misfit(cluster), *without)))
        return Predictions(known, f"{shown}\n{words(cluster)}")

    return collectively(world, predict)


def lacking(cluster: Cluster, places: Placement, key: Key) -> str:
    """Why nothing run as the key has it can be predicted; nothing where the cluster has the prices."""
    if key.scheme in (SUM, NULL):
        return ""
    try:
        cluster.executor_for(places, executor_over(key.transport, key.executor))
    except ArgumentError as error:
        return f"no prices: {error}"
    return ""


def timed(
    cluster: Cluster,
    places: Placement,
    nodes: Sequence[Sequence[int]],
    key: Key,
    own: Mapping[str, Schedule],
    disturbed: Disturbance = UNDISTURBED,
) -> Timed | None:
    """What gives the microseconds of one key; None for libraries and baselines without a schedule or a ring's
    formula, for an executor without prices there, and for whole steps that ranks do not enter together, or
    where it does not say how fast a rank reads."""
    if key.scheme in (SUM, NULL) or lacking(cluster, places, key):
        return None
    executor = executor_over(key.transport, key.executor)
    if key.what == "decode" and (cluster.memory is None or disturbed != UNDISTURBED):
        return None
    size = np.dtype(DTYPES[key.dtype]).itemsize
    shape = Shape(key.tokens, key.heads, key.kv_heads, key.head_dim, key.batch, key.queries, size)
    if key.scheme == "kv_ring":
        return lambda of, _: kv_ring_time(of, places, shape, executor)

    def step(exchange: Callable[[Cluster], float]) -> Timed:
        return lambda of, _: attention_time(of, key.ranks, shape) + exchange(of)

    if key.scheme == "query_ring":
        return step(lambda of: query_ring_exchange(of, places, shape, executor))
    selection = select(own.get(key.scheme, key.scheme))
    if selection.own is not None and selection.own.size != key.ranks:  # to run it will say so
        return None
    if selection.own is None and selection.row.generator is None:
        return None
    try:
        schedule = selection.build(key.ranks, nodes if selection.needs_nodes else None)
    except RestrictionError:  # likewise
        return None
    if key.what == "reduce":
        records = key.batch * key.heads * key.queries
        payload = Payload(records, WIRE_BYTES[key.wire] * (key.head_dim + 2), key.queries)
        return lambda of, draw: (
            simulate(schedule, of, places, payload, executor, None, disturbed, draw).completion
        )
    return step(lambda of: reduction_time(of, places, schedule, shape, executor))
