"""Bandwidth of send and receive between two ranks, within a node and between nodes, by message size."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from treeattn import comm as comm_
from treeattn.study.compare.sweep import meet_asleep
from treeattn.study.paper.experiment import Cell, Experiment, Table
from treeattn.study.paper.machines import DGX_H100

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["Bandwidth", "BandwidthSetting", "pairs", "ping_pong"]

Groups = tuple[tuple[int, ...], ...]

WARM_UP = 3


@dataclass(frozen=True, slots=True)
class BandwidthSetting:
    """sizes: bytes of a message. volume: about so many bytes go each way for one size, in at least `fewest`
    and at most `most` messages."""

    sizes: tuple[int, ...]
    volume: int = 32 << 20
    fewest: int = 9
    most: int = 400

    def count(self, size: int) -> int:
        """Messages each way of this size."""
        return max(self.fewest, min(self.most, self.volume // size))


def pairs(groups: Groups) -> dict[str, tuple[int, int] | None]:
    """Two ranks of one node, and two of different nodes; None where the job has no such ranks."""
    shared = next((ranks for ranks in groups if len(ranks) > 1), None)
    return {
        "within a node": None if shared is None else (shared[0], shared[1]),
        "between nodes": None if len(groups) < 2 else (groups[0][0], groups[1][0]),
    }


def ping_pong(comm: Intracomm, pair: tuple[int, int], size: int, count: int) -> float:
    """Microseconds of one message of `size` bytes between `pair`: half the median round trip.

    Collective: ranks outside of the pair sleep meanwhile, so that they take no core away.
    """
    half = 0.0
    if comm.rank in pair:
        trips = _round_trips(comm, pair, size, WARM_UP + count)[WARM_UP:]
        half = statistics.median(trips) / 2000
    meet_asleep(comm)
    return float(comm.bcast(half, root=pair[0]))


def _round_trips(comm: Intracomm, pair: tuple[int, int], size: int, count: int) -> list[int]:
    """Nanoseconds of each round trip as this rank sees it."""
    first = comm.rank == pair[0]
    other = pair[1] if first else pair[0]
    leaving, coming = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
    trips = []
    for _ in range(count):
        began = time.perf_counter_ns()
        if first:
            comm.Send(leaving, other)
            comm.Recv(coming, other)
        else:
            comm.Recv(coming, other)
            comm.Send(leaving, other)
        trips.append(time.perf_counter_ns() - began)
    return trips


@dataclass(frozen=True)
class Bandwidth(Experiment):
    """What makes a topology-aware reduction worth while."""

    name: ClassVar[str] = "bandwidth"
    title: ClassVar[str] = "send and receive by message size, within a node and between nodes"
    where: ClassVar[str] = "the figure of NCCL send and receive between two H100, in and across nodes"
    assumptions: ClassVar[tuple[str, ...]] = (
        "one message takes hop + size / bandwidth; NVLink 0.6 µs and 370 GB/s, InfiniBand NDR 5.0 µs and 48",
        *DGX_H100.sources[1:4],
    )
    differences: ClassVar[tuple[str, ...]] = (
        "the paper has a figure of this; no number was read off it, so there is none to compare with here",
        "here: MPI between processors, not NCCL between GPUs. Within a node MPI copies through shared "
        "memory, which is bound by caches and memory, so large messages need not be the fastest",
    )

    paper: BandwidthSetting = BandwidthSetting(tuple(1024 << 4 * step for step in range(6)))
    small: BandwidthSetting = BandwidthSetting(tuple(64 << 2 * step for step in range(9)))

    def model(self) -> list[Table]:
        """GB/s of one message by size."""
        links = DGX_H100.within, DGX_H100.between
        rows: list[tuple[Cell, ...]] = []
        for size in self.paper.sizes:
            within, between = (size / (1e3 * link.microseconds(size)) for link in links)
            rows.append((size, within, between, within / between, "in the figure"))
        tiers = ("within a node, GB/s: model", "between nodes, GB/s: model")
        return [Table("DGX H100", ("bytes", *tiers, "ratio: model", "paper"), tuple(rows))]

    def measure(self, comm: Intracomm) -> list[Table]:
        """MPI_Send and MPI_Recv back and forth."""
        found = pairs(comm_.node_groups(comm))
        reachable = {tier: pair for tier, pair in found.items() if pair is not None}
        if not reachable:
            return []
        rows: list[tuple[Cell, ...]] = []
        for size in self.small.sizes:
            cells: list[Cell] = [size]
            for pair in reachable.values():
                half = ping_pong(comm, pair, size, self.small.count(size))
                cells += [half, size / (1e3 * half)]
            rows.append(tuple(cells))
        headings: tuple[str, ...] = ("bytes",)
        for tier, pair in reachable.items():
            headings += (f"{tier} (ranks {pair[0]}, {pair[1]}), µs: here", f"{tier}, GB/s: here")
        title = "run here: half a round trip, median"
        for tier in found.keys() - reachable.keys():
            title += f"; this job has no two ranks {tier}"
        return [Table(title, headings, tuple(rows))] if comm.rank == 0 else []
