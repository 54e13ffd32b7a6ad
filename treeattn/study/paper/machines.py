"""The paper's machine as the models see it: nodes of 8 H100, NVLink 4 within, one NDR InfiniBand card per GPU
between them. Few constants, each with its source; docs/paper.md says which are assumed."""

from __future__ import annotations

from typing import NamedTuple

from treeattn.errors import ArgumentError


class Link(NamedTuple):
    """One direction between two GPUs. hop: microseconds of a small message. reached: GB/s in copies."""

    hop: float
    reached: float

    def microseconds(self, size: float) -> float:
        """Time of one message of `size` bytes at the bandwidth that is reached."""
        return self.hop + size / (1e3 * self.reached)


GPUS_PER_NODE = 8
MEMORY = 3350.0  # GB/s on paper: data sheet of the H100 SXM
MEMORY_SHARE = 0.75  # of it that a decoding kernel reaches: assumed
# Hops as NCCL 2.30.7, src/graph/tuning.cc, prices them for its tree with the low-latency protocol.
WITHIN = Link(hop=0.6, reached=370.0)  # NVLink 4: NVIDIA/nccl#1264
BETWEEN = Link(hop=5.0, reached=48.0)  # InfiniBand NDR: 48 of 50 GB/s assumed
COLLECTIVE = 6.8  # microseconds of an all-reduction before its first hop: tuning.cc
RING_STEP = 15.0  # microseconds of a step of a ring beside the bytes: assumed


def nodes(gpus: int) -> int:
    """Nodes that hold so many GPUs. Raises `ArgumentError` for nodes filled in part."""
    if gpus % GPUS_PER_NODE:
        raise ArgumentError(f"{gpus} GPUs do not fill nodes of {GPUS_PER_NODE}")
    return gpus // GPUS_PER_NODE


def small_allreduce(gpus: int) -> float:
    """Microseconds of NCCL's tree for a few KiB: a chain within nodes, a binary tree between them, up and
    down. NCCL's own formula (tuning.cc); the bytes add less than a microsecond and are left out."""
    up = (GPUS_PER_NODE - 1) * WITHIN.hop + (nodes(gpus).bit_length() - 1) * BETWEEN.hop
    return COLLECTIVE + 2 * up


def allreduce_hops(gpus: int) -> int:
    """Messages one after the other in that tree."""
    return 2 * (GPUS_PER_NODE - 1 + nodes(gpus).bit_length() - 1)
