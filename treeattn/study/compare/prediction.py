"""What the simulator says of the points of a comparison, on a cluster that is described."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np

from treeattn.attention.shape import DTYPES
from treeattn.collectives.catalog import EXECUTOR_OVER
from treeattn.collectives.clusters.critical_path import Cost
from treeattn.collectives.clusters.description import Cluster
from treeattn.collectives.clusters.placement import Placement
from treeattn.collectives.schedule import Schedule
from treeattn.errors import ArgumentError, ScheduleError
from treeattn.mpi import topology
from treeattn.mpi.communicators import MpiCommunicator, collectively
from treeattn.mpi.topology import Described
from treeattn.selection import select
from treeattn.study.compare.rows import Key
from treeattn.study.decode_step import (
    StepShape,
    attention_cost,
    kv_ring_cost,
    query_ring_exchange,
    reduction_cost,
)
from treeattn.study.intervals import Estimate, estimates, words


def predictions(
    world: MpiCommunicator, named: Described, keys: Sequence[Key], user_schedules: Mapping[str, Schedule]
) -> tuple[dict[Key, Estimate], str]:
    """On rank 0 predictions of every key that can be predicted on this cluster, and what it is, in words.
    user_schedules: by name.

    Collective. Raises, the same on every rank, where the cluster has no room for the job.
    """
    found = topology.detect(world)

    def predict() -> tuple[dict[Key, Estimate], str]:
        known: dict[Key, Estimate] = {}
        if world.rank != 0:
            return known, ""
        cluster, places = named.cluster, found.places_on(named.cluster)
        without: dict[str, None] = {}
        for _, case in groupby(keys, lambda key: key.case):
            costs: dict[Key, Cost] = {}
            for key in case:
                try:
                    one = predicted(cluster, places, found.nodes, key, user_schedules)
                except ArgumentError as error:
                    without[f"no prices: {error}"] = None
                    continue
                if one is not None:
                    costs[key] = one
            known |= zip(costs, estimates(cluster, list(costs.values())), strict=True)
        shown = "; ".join(filter(None, (named.shown, found.misfit(cluster), *without)))
        return known, f"{shown}\n{words(cluster, ((key.label, one) for key, one in known.items()))}"

    return collectively(world, predict)


def predicted(
    cluster: Cluster,
    places: Placement,
    nodes: Sequence[Sequence[int]],
    key: Key,
    user_schedules: Mapping[str, Schedule],
) -> Cost | None:
    """What one key costs; None for libraries and baselines without a schedule or a ring's formula, and for
    whole steps where the cluster does not say how fast a rank reads. Raises `ArgumentError` where it has no
    prices of what runs the key."""
    if key.algorithm is not None:
        return None
    executor = cluster.executor_for(places, EXECUTOR_OVER.get(key.transport))
    size = np.dtype(DTYPES[key.dtype]).itemsize
    shape = StepShape(key.tokens, key.heads, key.kv_heads, key.head_dim, key.batch, key.queries, size)
    attention = Cost({})
    if key.what == "decode":
        if cluster.memory is None:
            return None
        attention = attention_cost(cluster, key.ranks, shape)
    if key.scheme == "kv_ring":
        return kv_ring_cost(cluster, places, shape, executor)
    if key.scheme == "query_ring":
        return attention + query_ring_exchange(cluster, places, shape, executor)
    selection = select(user_schedules.get(key.scheme, key.scheme))
    if selection.own is not None and selection.own.size != key.ranks:
        return None
    try:
        schedule = selection.build(key.ranks, nodes)
    except ScheduleError:  # a library's or a baseline; what cannot be, running it will say
        return None
    return attention + reduction_cost(cluster, places, schedule, shape, executor)
