"""A whole decode step on a described cluster: attention at the memory's rate, then the reduction; and the
rings'.

Attention reads the shard once at `Cluster.memory`, the measured or assumed rate of one rank. A tree reduces
afterwards. The ring of keys and values (Liu et al., "Ring Attention", 2023) sends shards p - 1 times,
attending meanwhile; the ring of queries passes the partials of slices of heads on (pass-Q, Yang et al.,
2024), attending a p-th of its work in each hop, and gathers the slices in the end.
"""

from __future__ import annotations

from operator import attrgetter
from typing import NamedTuple

from treeattn.collectives import Schedule, Transfer
from treeattn.collectives.clusters.critical_path import Cost, cost
from treeattn.collectives.clusters.description import Cluster
from treeattn.collectives.clusters.placement import Placement
from treeattn.collectives.clusters.simulate import simulate
from treeattn.collectives.schedule import Payload
from treeattn.errors import ArgumentError


class StepShape(NamedTuple):
    """The sizes of a step: tokens over all ranks. bytes: of an element of the cache."""

    tokens: int
    heads: int = 16
    kv_heads: int = 16
    head_dim: int = 128
    batch: int = 1
    queries: int = 1
    bytes: int = 2

    @property
    def payload(self) -> Payload:
        """The records of a rank."""
        record = (8 if self.bytes == 8 else 4) * (self.head_dim + 2)
        return Payload(self.batch * self.heads * self.queries, record, self.queries)


def attention_cost(cluster: Cluster, ranks: int, shape: StepShape) -> Cost:
    """The cost of a rank's attention. Raises `ArgumentError` for a cluster that does not say how fast a rank
    reads."""
    if cluster.memory is None:
        raise ArgumentError(
            f"{cluster.name}: memory: missing, in GB/s that a rank reads its cache at; add it"
        )
    return Cost({("memory", "memory" in cluster.assumed): _shard(ranks, shape) / (1e3 * cluster.memory)})


def reduction_cost(
    cluster: Cluster, places: Placement, schedule: Schedule, shape: StepShape, executor: str | None = None
) -> Cost:
    """The cost of the reduction alone."""
    return cost(simulate(schedule, cluster, places, shape.payload, executor))


def kv_ring_cost(cluster: Cluster, places: Placement, shape: StepShape, executor: str | None = None) -> Cost:
    """The cost of a step by the ring of keys and values. Raises as `attention_cost`."""
    ranks = len(places)
    attention = attention_cost(cluster, ranks, shape)
    hop = _hop(cluster, places, round(_shard(ranks, shape)), executor)
    return (ranks - 1) * max(hop, attention, key=attrgetter("time")) + attention


def query_ring_exchange(
    cluster: Cluster, places: Placement, shape: StepShape, executor: str | None = None
) -> Cost:
    """The cost of a step by the ring of queries, without the attention of a rank."""
    ranks, payload = len(places), shape.payload
    slice_ = -(-payload.records // ranks) * payload.record_bytes
    pass_on = _hop(cluster, places, slice_, executor)
    gather = cost(simulate(_gather(ranks), cluster, places, Payload(ranks, slice_), executor))
    return (ranks - 1) * pass_on + gather


def _shard(ranks: int, shape: StepShape) -> float:
    """Bytes of a rank's keys and values."""
    return 2 * shape.batch * shape.tokens * shape.kv_heads * shape.head_dim * shape.bytes / ranks


def _hop(cluster: Cluster, places: Placement, size: int, executor: str | None) -> Cost:
    """Every rank sends `size` bytes to the next, all at once."""
    ranks = len(places)
    if ranks == 1:
        return Cost({})
    turn = tuple(Transfer(rank, (rank + 1) % ranks, range(1), False) for rank in range(ranks))
    shift = Schedule("one hop of a ring", ranks, 1, (turn,))
    return cost(simulate(shift, cluster, places, Payload(1, size), executor))


def _gather(ranks: int) -> Schedule:
    """Every rank sends its slice to all others in one round, as `query_ring` ends."""
    sends = tuple(
        Transfer(src, dst, range(src, src + 1), False)
        for src in range(ranks)
        for dst in range(ranks)
        if src != dst
    )
    return Schedule("gather of slices", ranks, ranks, (sends,) if sends else ())
