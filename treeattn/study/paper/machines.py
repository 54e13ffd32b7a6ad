"""The machine of the paper as the models see it: few constants, each with its source."""

from __future__ import annotations

from dataclasses import dataclass

from treeattn.errors import ArgumentError

__all__ = ["DGX_H100", "Link", "Machine"]


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two GPUs. hop: microseconds of a small message, as NCCL's tuning model prices a
    hop of its tree with the low-latency protocol. peak, reached: GB/s (10^9 bytes) on paper and in copies."""

    hop: float
    peak: float
    reached: float

    def microseconds(self, size: float) -> float:
        """Time of one message of `size` bytes at the bandwidth that is reached."""
        return self.hop + size / (1e3 * self.reached)


@dataclass(frozen=True, slots=True)
class Machine:
    """GPUs in nodes. memory: GB/s on paper; memory_share: how much of it a decoding kernel is taken to reach;
    collective: microseconds that an all-reduction costs before its first hop; ring_step: microseconds that a
    step of a ring costs beside the bytes."""

    name: str
    gpus_per_node: int
    memory: float
    memory_share: float
    within: Link
    between: Link
    collective: float
    ring_step: float
    sources: tuple[str, ...]

    def nodes(self, gpus: int) -> int:
        """Nodes that hold so many GPUs. Raises `ArgumentError` for nodes filled in part."""
        if gpus % self.gpus_per_node:
            raise ArgumentError(f"{gpus} GPUs do not fill nodes of {self.gpus_per_node}")
        return gpus // self.gpus_per_node

    def slowest_link(self, gpus: int) -> Link:
        """The link that a ring over so many GPUs waits for."""
        return self.within if self.nodes(gpus) == 1 else self.between

    def reading(self, size: float) -> float:
        """Microseconds in which a decoding kernel reads `size` bytes."""
        return size / (1e3 * self.memory * self.memory_share)

    def small_allreduce(self, gpus: int) -> float:
        """Microseconds of NCCL's tree for a few KiB: a chain within nodes, a binary tree between them, up and
        down. NCCL's own formula (tuning.cc); the bytes add less than a microsecond and are left out."""
        nodes = self.nodes(gpus)
        up = (self.gpus_per_node - 1) * self.within.hop + (nodes.bit_length() - 1) * self.between.hop
        return self.collective + 2 * up

    def allreduce_hops(self, gpus: int) -> int:
        """Messages one after the other in that tree."""
        return 2 * (self.gpus_per_node - 1 + self.nodes(gpus).bit_length() - 1)


DGX_H100 = Machine(
    name="DGX H100: nodes of 8 GPUs, NVLink 4 within, one NDR InfiniBand card per GPU between",
    gpus_per_node=8,
    memory=3350.0,
    memory_share=0.75,
    within=Link(hop=0.6, peak=450.0, reached=370.0),
    between=Link(hop=5.0, peak=50.0, reached=48.0),
    collective=6.8,
    ring_step=15.0,
    sources=(
        "memory 3350 GB/s: data sheet of the H100 SXM; that a decoding kernel reaches 75 % of it is assumed",
        "NVLink 450 GB/s each way on paper, 370 in copies between two GPUs: NVIDIA/nccl#1264 (371 to 377)",
        "NDR 50 GB/s on paper, 48 taken as reached",
        "all-reduction of a few KiB: NCCL 2.30.7, src/graph/tuning.cc, tree, protocol LL: 6.8 µs + 2 x (7 x "
        "0.6 µs within a node + log2(nodes) x 5.0 µs between); times measured elsewhere are up to 3 times "
        "that (NVIDIA/nccl#1453)",
        "15 µs for a step of the ring beside its bytes: assumed",
    ),
)
