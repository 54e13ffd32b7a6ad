"""Time of one decoding step against context length and number of GPUs: the ring against the tree."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from treeattn.collectives.clusters import description
from treeattn.mpi.communicators import MpiCommunicator
from treeattn.study.decode_step import (
    StepShape,
    attention_cost,
    kv_ring_cost,
    query_ring_exchange,
    reduction_cost,
)
from treeattn.study.paper.experiment import IN_THE_FIGURE, MACHINE, Table, decode_key, median, placed, run

TITLE = "time of a decoding step against context length and GPUs, ring against tree"
WHERE = "section 6.1, figure 3"
PAPER = {
    "heads": 16, "head_dim": 128,
    "tokens": [80_000 << doubling for doubling in range(7)], "ranks": [8, 64, 128],
}  # fmt: skip
SMALL = {
    "heads": 16, "head_dim": 128, "tokens": [1_000, 4_000, 16_000], "ranks": [2, 4],
    "effort": {"repetitions": 5, "iterations": 20, "seconds": 0.2},
}  # fmt: skip
RING, TREE, OURS, SIMULATED = "kv_ring", "three_allreduce", "binary_tree", "hierarchical"
#: Ring / tree in the paper's largest setting, 5.12M tokens on 128 GPUs: "close to 8" in section 6.1.
RATIO = 8.0


def model(tokens: Sequence[int], ranks: Sequence[int], heads: int, head_dim: int) -> list[Table]:
    """Whole steps in milliseconds, simulated: the ring of keys and values, that of queries, and our tree; and
    what would have to be added to ring and tree for the paper's ratio."""
    cluster = description.load(MACHINE)
    of_gpus = {}  # what no length changes
    for gpus in ranks:
        (schedule, places), shape = placed(cluster, SIMULATED, gpus), StepShape(0, heads, heads, head_dim)
        exchanges = (
            query_ring_exchange(cluster, places, shape),
            reduction_cost(cluster, places, schedule, shape),
        )
        of_gpus[gpus] = places, *exchanges
    rows: list[dict[str, Any]] = []
    for size, gpus in itertools.product(tokens, ranks):
        (places, around, reduction), shape = of_gpus[gpus], StepShape(size, heads, heads, head_dim)
        attention, ring = attention_cost(cluster, gpus, shape).time, kv_ring_cost(cluster, places, shape).time
        tree = attention + reduction.time
        rows.append({
            "tokens": size,
            "GPUs": gpus,
            "attention, ms: simulated": attention / 1000,
            "kv_ring, ms: simulated": ring / 1000,
            "query_ring, ms: simulated": (attention + around.time) / 1000,
            f"{SIMULATED}, ms: simulated": tree / 1000,
            "ring / tree: simulated": ring / tree,
            "ring / tree: paper": IN_THE_FIGURE,
        })  # fmt: skip
    rows[-1]["ring / tree: paper"] = f"close to {RATIO:g}"
    constant = (ring - RATIO * tree) / (RATIO - 1) / 1000  # of the last and largest setting
    what = f"constant on both sides that would make ring / tree {RATIO:g}, ms: simulated"
    title = f"what {RATIO:g} would take, {tokens[-1] / 1e6:g}M tokens on {ranks[-1]} GPUs"
    return [Table(f"{MACHINE}, simulated: whole steps", rows), Table(title, [{what: constant}])]


def measure(
    comm: MpiCommunicator,
    ranks: Sequence[int],
    tokens: Sequence[int],
    heads: int,
    head_dim: int,
    effort: dict[str, Any],
) -> list[Table]:
    """kv_ring, three_allreduce (the paper's tree) and binary_tree (ours), side by side in each case."""
    cases = itertools.product(ranks, tokens, (RING, TREE, OURS))
    keys = [decode_key(scheme, size, length, heads, head_dim) for size, length, scheme in cases]
    found = list(run(comm, keys, effort).items())
    rows: list[dict[str, Any]] = []
    for (key, of_ring), (_, of_tree), (_, of_ours) in zip(found[::3], found[1::3], found[2::3], strict=True):
        ring, tree, ours = (median(blocks, "time_us") for blocks in (of_ring, of_tree, of_ours))
        cold_ring, cold_tree = (median(blocks, "plan_us", "first_us") for blocks in (of_ring, of_tree))
        rows.append({
            "tokens": key.tokens,
            "ranks": key.ranks,
            f"{RING}, ms: here": ring,
            f"{TREE}, ms: here": tree,
            f"{OURS}, ms: here": ours,
            "ring / tree: here": ring / tree,
            f"ring / {OURS}: here": ring / ours,
            "ring / tree, cold: here": cold_ring / cold_tree,
        })  # fmt: skip
    return [Table(f"run here, warm medians; tree: {TREE}", rows)] if rows else []
