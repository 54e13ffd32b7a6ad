"""Time of one decoding step against context length and number of GPUs: the ring against the tree."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from treeattn.collectives.clusters import description
from treeattn.study.decode_step import (
    StepShape,
    attention_cost,
    kv_ring_cost,
    query_ring_exchange,
    reduction_cost,
)
from treeattn.study.paper.experiment import IN_THE_FIGURE, MACHINE, Table, placed

TITLE = "time of a decoding step against context length and GPUs, ring against tree"
WHERE = "section 6.1, figure 3"
PAPER = {
    "heads": 16, "head_dim": 128,
    "tokens": [80_000 << doubling for doubling in range(7)], "ranks": [8, 64, 128],
}  # fmt: skip
SIMULATED = "hierarchical"
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
