"""Peak memory of one attention block on two devices: equations 8 and 9."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treeattn.study import laws
from treeattn.study.paper.experiment import Table

TITLE = "peak memory of one attention block on two devices, ring against tree"
WHERE = "section 6.2, equations 8 and 9"
PAPER = {"shard": 64_000, "heads": [16, 32], "head_dim": 128}
CACHE = 2  # bytes of an element of keys, values and query
MB = 1e6
RING, TREE = "kv_ring", "binary_tree"

#: Hidden size -> the gap between ring and tree in section 6.2, MB.
GAPS = {2048: 524.0, 4096: 1040.0}


def law(scheme: str, shard: int, heads: int, head_dim: int) -> int:
    """Bytes that equation 8 (ring) or 9 (tree) gives for 16-bit elements. shard: tokens of one device."""
    peak = laws.ring_peak_memory if scheme == RING else laws.tree_peak_memory
    return peak(1, shard, heads, head_dim) * CACHE


def model(shard: int, heads: Sequence[int], head_dim: int) -> list[Table]:
    """Equations 8 and 9, and their gap beside the paper's."""
    rows: list[dict[str, Any]] = []
    for count in heads:
        ring, tree = (law(scheme, shard, count, head_dim) / MB for scheme in (RING, TREE))
        gap = GAPS[count * head_dim]
        rows.append({
            "hidden size": count * head_dim,
            "tokens of a device: assumed": shard,
            "ring, MB: eq. 8": ring,
            "tree, MB: eq. 9": tree,
            "gap, MB: here": None,
            "gap, MB: paper": gap,
            "gap, MB: model": ring - tree,
            "model / paper - 1": (ring - tree) / gap - 1,
        })  # fmt: skip
    return [Table("the paper's setting, 2 devices", rows)]
