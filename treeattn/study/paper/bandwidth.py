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
from treeattn.collectives.runtime.communicator import MpiCommunicator
from treeattn.collectives.traffic import Payload
from treeattn.mpi import communicators
from treeattn.study.paper.experiment import IN_THE_FIGURE, MACHINE, Cell, Experiment, Table

WARM_UP = 3


def model(sizes: Sequence[int]) -> list[Table]:
    """GB/s of one message, simulated."""
    cluster = description.load(MACHINE)
    send = Schedule("send", 2, 1, ((Transfer(0, 1, range(1), False),),))
    rows: list[tuple[Cell, ...]] = []
    for size in sizes:
        one = Payload(1, size)
        within, between = (
            size / (1e3 * (found.time - found.prices.call - found.prices.round))
            for found in (simulate(send, cluster, (0, far), one) for far in (1, cluster.slots))
        )
        rows.append((size, within, between, within / between, IN_THE_FIGURE))
    tiers = "within a node, GB/s: simulated", "between nodes, GB/s: simulated"
    headings = ("bytes", *tiers, "ratio: simulated", "paper")
    return [Table(f"{MACHINE}, simulated: one message, without the call", headings, rows)]


def measure(comm: MpiCommunicator, sizes: Sequence[int], volume: int, fewest: int, most: int) -> list[Table]:
    """MPI_Send and MPI_Recv back and forth: about `volume` bytes each way, in `fewest` to `most` messages."""
    found = pairs(communicators.node_groups(comm))
    title, headings = "run here: half a round trip, median", ["bytes"]
    columns: list[Sequence[float]] = [sizes]
    for tier, pair in found.items():
        if pair is None:
            title += f"; this job has no two ranks {tier}"
            continue
        headings += [f"{tier} (ranks {pair[0]}, {pair[1]}), µs: here", f"{tier}, GB/s: here"]
        halves = [ping_pong(comm, pair, size, max(fewest, min(most, volume // size))) for size in sizes]
        columns += [halves, [size / (1e3 * half) for size, half in zip(sizes, halves, strict=True)]]
    if comm.rank or len(columns) == 1:
        return []
    return [Table(title, tuple(headings), list(zip(*columns, strict=True)))]


def pairs(groups: Sequence[Sequence[int]]) -> dict[str, tuple[int, int] | None]:
    """Two ranks of one node, and two of different nodes; None where the job has no such ranks."""
    shared = next((ranks for ranks in groups if len(ranks) > 1), None)
    return {
        "within a node": None if shared is None else (shared[0], shared[1]),
        "between nodes": None if len(groups) < 2 else (groups[0][0], groups[1][0]),
    }


def ping_pong(comm: MpiCommunicator, pair: tuple[int, int], size: int, count: int) -> float:
    """Microseconds of one message of `size` bytes between `pair`: half the median round trip.

    Collective: ranks outside of the pair sleep meanwhile, so that they take no core away.
    """
    trips = []
    other = pair[1] if comm.rank == pair[0] else pair[0]
    calls: Any = [(call, np.zeros(size, np.uint8)) for call in (comm.Send, comm.Recv)]
    for _ in range(WARM_UP + count) if comm.rank in pair else ():
        began = time.perf_counter_ns()
        for call, buffer in calls if comm.rank == pair[0] else calls[::-1]:
            call(buffer, other)
        trips.append(time.perf_counter_ns() - began)
    comm.barrier_asleep()
    return float(comm.bcast(statistics.median(trips[WARM_UP:]) / 2000 if trips else None, root=pair[0]))


EXPERIMENT = Experiment(
    title="send and receive by message size, within a node and between nodes",
    where="the figure of NCCL send and receive between two H100, in and across nodes",
    model=model,
    measure=measure,
    paper={"sizes": tuple(1024 << 4 * step for step in range(6))},
    small={"sizes": tuple(64 << 2 * step for step in range(9)), "volume": 32 << 20, "fewest": 9, "most": 400},
)
