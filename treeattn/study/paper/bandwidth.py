"""Bandwidth of send and receive between two ranks, within a node and between nodes, by message size."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from treeattn.collectives import Schedule, Transfer
from treeattn.collectives.clusters import description
from treeattn.collectives.clusters.simulate import simulate
from treeattn.collectives.schedule import Payload
from treeattn.mpi import communicators
from treeattn.mpi.communicators import MpiCommunicator
from treeattn.study.paper.experiment import IN_THE_FIGURE, MACHINE, Table

TITLE = "send and receive by message size, within a node and between nodes"
WHERE = "the figure of NCCL send and receive between two H100, in and across nodes"
PAPER = {"sizes": [1024 << 4 * step for step in range(6)]}
SMALL = {"sizes": [64 << 2 * step for step in range(9)], "volume": 32 << 20, "fewest": 9, "most": 400}
_WARM_UP = 3


def model(sizes: Sequence[int]) -> list[Table]:
    """GB/s of one message, simulated."""
    cluster = description.load(MACHINE)
    send = Schedule("send", 2, 1, ((Transfer(0, 1, range(1), False),),))

    def rate(size: int, place: int) -> float:
        found = simulate(send, cluster, (0, place), Payload(1, size))
        return size / (1e3 * (found.time - found.prices.call - found.prices.round))

    return [Table(f"{MACHINE}, simulated: one message, without the call", [
        {
            "bytes": size,
            "within a node, GB/s: simulated": within,
            "between nodes, GB/s: simulated": between,
            "ratio: simulated": within / between,
            "paper": IN_THE_FIGURE,
        }
        for size in sizes
        for within, between in [(rate(size, 1), rate(size, cluster.slots))]
    ])]  # fmt: skip


def measure(comm: MpiCommunicator, sizes: Sequence[int], volume: int, fewest: int, most: int) -> list[Table]:
    """MPI_Send and MPI_Recv back and forth: about `volume` bytes each way, in `fewest` to `most` messages."""
    nodes = communicators.node_groups(comm)
    shared = next((ranks[:2] for ranks in nodes if len(ranks) > 1), None)
    apart = (nodes[0][0], nodes[1][0]) if len(nodes) > 1 else None
    title = "run here: half a round trip, median"
    rows: list[dict[str, Any]] = [{"bytes": size} for size in sizes]
    for tier, pair in {"within a node": shared, "between nodes": apart}.items():
        if pair is None:
            title += f"; this job has no two ranks {tier}"
            continue
        for row, size in zip(rows, sizes, strict=True):
            half = ping_pong(comm, pair, size, max(fewest, min(most, volume // size)))
            row[f"{tier} (ranks {pair[0]}, {pair[1]}), µs: here"] = half
            row[f"{tier}, GB/s: here"] = size / (1e3 * half)
    return [] if comm.rank or comm.size == 1 else [Table(title, rows)]


def ping_pong(comm: MpiCommunicator, pair: Sequence[int], size: int, count: int) -> float:
    """Microseconds of one message of `size` bytes between `pair`: half the median round trip.

    Collective: ranks outside of the pair sleep meanwhile, so that they take no core away.
    """
    trips = []
    other = pair[1] if comm.rank == pair[0] else pair[0]
    calls: Any = [(call, np.zeros(size, np.uint8)) for call in (comm.Send, comm.Recv)]
    for _ in range(_WARM_UP + count) if comm.rank in pair else ():
        began = time.perf_counter_ns()
        for call, buffer in calls if comm.rank == pair[0] else calls[::-1]:
            call(buffer, other)
        trips.append(time.perf_counter_ns() - began)
    comm.barrier_asleep()
    return float(comm.bcast(statistics.median(trips[_WARM_UP:]) / 2000 if trips else None, root=pair[0]))
