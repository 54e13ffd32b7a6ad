"""What travels: equations 10 to 14, and the example of section 6.3."""

from __future__ import annotations

from typing import Any

from treeattn.collectives.clusters import description
from treeattn.collectives.clusters.placement import block
from treeattn.study import laws
from treeattn.study.decode_step import StepShape, attention_cost, kv_ring_cost
from treeattn.study.paper.experiment import MACHINE, Table

TITLE = "communication volume, and whether a ring can hide it behind computation"
WHERE = "section 6.3, equations 10 to 14"
PAPER = {"tokens": 640_000, "ranks": 8, "heads": 16, "head_dim": 128}
CACHE = 2  # bytes of an element


def model(tokens: int, ranks: int, heads: int, head_dim: int) -> list[Table]:
    """Section 6.3's example."""
    cluster, shape = description.load(MACHINE), StepShape(tokens, heads, heads, head_dim)
    of_rank = tokens // ranks
    shard = laws.shard_elements(1, of_rank, heads, head_dim) * CACHE
    attending, ring = (
        attention_cost(cluster, ranks, shape).time,
        kv_ring_cost(cluster, block(cluster, ranks), shape).time,
    )
    attention, hop = attending / 1e6, (ring - attending) / (ranks - 1) / 1e6
    full, least = (laws.ring_volume(1, of_rank, heads, head_dim, hops) for hops in (ranks, ranks - 1))
    tree = float(laws.tree_volume(1, heads, head_dim, ranks))
    hidden = f"hidden size {heads * head_dim}"
    headings = f"{tokens} tokens, {ranks} GPUs, {hidden}", "here", "paper", "model"
    rows: list[dict[str, Any]] = [
        dict(zip(headings, (what, None, paper, ours), strict=True))
        for what, paper, ours in (
            ("keys and values of a shard, bytes (eq. 11)", "2btd", shard),
            ("attention of a shard, s: simulated", "O(1e-5)", attention),
            ("one hop to the next GPU, s: simulated", "O(1e-3)", hop),
            ("hop / attention", "about 100 (from the two above)", hop / attention),
            ("ring, p hops: elements that a GPU sends", "2btdp (eq. 10)", full),
            ("ring, p - 1 hops: elements that a GPU sends", None, least),
            ("tree: elements that a GPU sends", "2(p-1)/p (bd + 2bn_h) (eq. 14)", tree),
            ("ring / tree, p - 1 hops", None, least / tree),
        )
    ]
    return [Table("the example of section 6.3", rows)]
