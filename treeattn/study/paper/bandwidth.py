"""Bandwidth of send and receive between two ranks, within a node and between nodes, by message size."""

from __future__ import annotations

from collections.abc import Sequence

from treeattn.collectives import Schedule, Transfer
from treeattn.collectives.clusters import description
from treeattn.collectives.clusters.simulate import simulate
from treeattn.collectives.schedule import Payload
from treeattn.study.paper.experiment import IN_THE_FIGURE, MACHINE, Table

TITLE = "send and receive by message size, within a node and between nodes"
WHERE = "the figure of NCCL send and receive between two H100, in and across nodes"
PAPER = {"sizes": [1024 << 4 * step for step in range(6)]}


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
