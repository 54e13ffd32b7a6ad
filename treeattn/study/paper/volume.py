"""What travels: equations 10 to 14, and the example of section 6.3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treeattn.collectives.clusters import description
from treeattn.collectives.clusters.placement import block
from treeattn.mpi.communicators import MpiCommunicator
from treeattn.study import laws
from treeattn.study.decode_step import StepShape, attention_cost, kv_ring_cost
from treeattn.study.paper.experiment import MACHINE, Table, decode_key, run

TITLE = "communication volume, and whether a ring can hide it behind computation"
WHERE = "section 6.3, equations 10 to 14"
PAPER = {"tokens": 640_000, "ranks": 8, "heads": 16, "head_dim": 128}
SMALL = {
    "tokens": 4_000, "ranks": [2, 4], "heads": 16, "head_dim": 128,
    "effort": {"repetitions": 1, "iterations": 3, "seconds": 0.01},  # nothing depends on time
}  # fmt: skip
CACHE, RECORD = 2, 4  # bytes of an element of the cache and of a record

#: Scheme -> the equation that it is held against.
SCHEMES = {
    "kv_ring": "10 with p - 1 hops",
    "kv_ring:rotation=full": "10",
    "query_ring": "14",
    "three_allreduce": "14",
    "ring": "14",
    "reduce_scatter_gather": "14",
    "binary_tree": "14",
    "recursive_doubling": "14",
}


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


def measure(
    comm: MpiCommunicator,
    ranks: Sequence[int],
    tokens: int,
    heads: int,
    head_dim: int,
    effort: dict[str, Any],
) -> list[Table]:
    """Payload of one step of every scheme of `SCHEMES` as it is handed to MPI, beside the law's. tokens: over
    all ranks."""
    keys = [decode_key(scheme, size, tokens, heads, head_dim) for size in ranks for scheme in SCHEMES]
    rows: list[dict[str, Any]] = []
    for key, blocks in run(comm, keys, effort).items():
        size = CACHE if key.scheme.startswith("kv_ring") else RECORD
        of_tiers = [blocks[0].get(f"bytes_{tier}") for tier in ("intra", "inter", "library")]
        sent = [number for number in of_tiers if number is not None]  # none where only the library knows
        here = sum(sent) / key.ranks / size if sent else None
        equation = SCHEMES[key.scheme]
        if equation == "14":
            expected = float(laws.tree_volume(1, heads, head_dim, key.ranks))
        else:
            hops = key.ranks if equation == "10" else key.ranks - 1
            expected = laws.ring_volume(1, tokens, heads, head_dim, hops) / key.ranks
        rows.append({
            "ranks": key.ranks,
            "scheme": key.scheme,
            "equation": equation,
            "elements a rank sends, mean: here": here,
            "elements: model": expected,
            "here / model": None if here is None else here / expected,
        })  # fmt: skip
    return [Table(f"run here, {tokens} tokens, hidden size {heads * head_dim}", rows)] if rows else []
