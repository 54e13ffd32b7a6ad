"""A whole decode step on a described cluster: attention at the memory's rate, then the reduction; and the
rings'.

Attention reads the shard once at `Cluster.memory`, the measured or assumed rate of one rank. A tree reduces
afterwards. The ring of keys and values (Liu et al., "Ring Attention", 2023) sends shards p - 1 times,
attending meanwhile; the ring of queries passes the partials of slices of heads on (pass-Q, Yang et al.,
2024), attending a p-th of its work in each hop, and gathers the slices in the end.
"""

from __future__ import annotations

from typing import NamedTuple

from treeattn.collectives import Schedule, Transfer
from treeattn.collectives.clusters.description import Cluster
from treeattn.collectives.clusters.placement import Placement
from treeattn.collectives.clusters.simulate import simulate
from treeattn.collectives.traffic import Payload
from treeattn.errors import ArgumentError


class Shape(NamedTuple):
    """Of the step: tokens over all ranks. bytes: of an element of the cache."""

    tokens: int
    heads: int = 16
    kv_heads: int = 16
    head_dim: int = 128
    batch: int = 1
    queries: int = 1
    bytes: int = 2


def attention_time(cluster: Cluster, ranks: int, shape: Shape) -> float:
    """Microseconds of a rank's attention. Raises `ArgumentError` for a cluster that does not say how fast a
    rank reads."""
    if cluster.memory is None:
        raise ArgumentError(
            f"{cluster.name}: memory: missing, in GB/s that a rank reads its cache at; add it"
        )
    return _shard(ranks, shape) / (1e3 * cluster.memory)


def reduction_time(
    cluster: Cluster, places: Placement, schedule: Schedule, shape: Shape, executor: str | None = None
) -> float:
    """Microseconds of the reduction alone."""
    records = shape.batch * shape.heads * shape.queries
    payload = Payload(records, 4 * (shape.head_dim + 2), shape.queries)
    return simulate(schedule, cluster, places, payload, executor).time


def kv_ring_time(cluster: Cluster, places: Placement, shape: Shape, executor: str | None = None) -> float:
    """Microseconds of the step by the ring of keys and values. Raises as `attention_time`."""
    ranks = len(places)
    attention = attention_time(cluster, ranks, shape)
    hop = _hop(cluster, places, round(_shard(ranks, shape)), executor)
    return (ranks - 1) * max(hop, attention) + attention


def query_ring_exchange(
    cluster: Cluster, places: Placement, shape: Shape, executor: str | None = None
) -> float:
    """Microseconds by which the step by the ring of queries is longer than the attention of a rank."""
    ranks, record = len(places), 4 * (shape.head_dim + 2)
    slice_ = -(-shape.batch * shape.heads * shape.queries // ranks) * record
    pass_on = _hop(cluster, places, slice_, executor)
    gather = simulate(_gather(ranks), cluster, places, Payload(ranks, slice_), executor).time
    return (ranks - 1) * pass_on + gather


def _shard(ranks: int, shape: Shape) -> float:
    """Bytes of a rank's keys and values."""
    return 2 * shape.batch * shape.tokens * shape.kv_heads * shape.head_dim * shape.bytes / ranks


def _hop(cluster: Cluster, places: Placement, size: int, executor: str | None) -> float:
    """Every rank sends `size` bytes to the next, all at once."""
    ranks = len(places)
    if ranks == 1:
        return 0.0
    turn = tuple(Transfer(rank, (rank + 1) % ranks, range(1), False) for rank in range(ranks))
    shift = Schedule("one hop of a ring", ranks, 1, (turn,))
    return simulate(shift, cluster, places, Payload(1, size), executor).time


def _gather(ranks: int) -> Schedule:
    """Every rank sends its slice to all others in one round, as `query_ring` ends."""
    sends = tuple(
        Transfer(src, dst, range(src, src + 1), False)
        for src in range(ranks)
        for dst in range(ranks)
        if src != dst
    )
    return Schedule("gather of slices", ranks, ranks, (sends,) if sends else ())
