"""Time of one decoding step against context length and number of GPUs: the ring against the tree."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from treeattn.collectives.clusters import description
from treeattn.study.compare.measure import Effort
from treeattn.study.compare.rows import Key
from treeattn.study.decode_step import (
    Shape,
    attention_cost,
    kv_ring_cost,
    query_ring_exchange,
    reduction_cost,
)
from treeattn.study.paper import experiment
from treeattn.study.paper.experiment import IN_THE_FIGURE, MACHINE, Cell, Experiment, Points, Table

SHAPE = {"heads": 16, "head_dim": 128}
EFFORT = Effort(repetitions=5, iterations=20, seconds=0.2)
RING, TREE, OURS = "kv_ring", "three_allreduce", "binary_tree"
SIMULATED = "hierarchical"
#: Ring / tree in the paper's largest setting, 5.12M tokens on 128 GPUs: "close to 8" in section 6.1.
RATIO = 8.0


def model(tokens: Sequence[int], ranks: Sequence[int], heads: int, head_dim: int) -> list[Table]:
    """Whole steps in milliseconds, simulated: the ring of keys and values, that of queries, and our tree; and
    what would have to be added to ring and tree for the paper's ratio."""
    cluster = description.load(MACHINE)
    rows: list[tuple[Cell, ...]] = []
    placed = {gpus: experiment.placed(cluster, SIMULATED, gpus) for gpus in ranks}
    any_length = Shape(0, heads, heads, head_dim)
    exchanges = {
        gpus: (
            query_ring_exchange(cluster, places, any_length).time,
            reduction_cost(cluster, places, schedule, any_length).time,
        )
        for gpus, (schedule, places) in placed.items()
    }
    for size, gpus in itertools.product(tokens, ranks):
        shape = any_length._replace(tokens=size)
        attention = attention_cost(cluster, gpus, shape).time
        query_ring, tree = (attention + exchange for exchange in exchanges[gpus])
        ring = kv_ring_cost(cluster, placed[gpus][1], shape).time
        largest = (size, gpus) == (max(tokens), max(ranks))
        says = f"close to {RATIO:g}" if largest else IN_THE_FIGURE
        times = (value / 1000 for value in (attention, ring, query_ring, tree))
        rows.append((size, gpus, *times, ring / tree, says))
        if largest:
            constant = (ring - RATIO * tree) / (RATIO - 1) / 1000
    headings = (
        "tokens", "GPUs", "attention, ms: simulated", "kv_ring, ms: simulated", "query_ring, ms: simulated",
        f"{SIMULATED}, ms: simulated", "ring / tree: simulated", "ring / tree: paper",
    )  # fmt: skip
    what = f"constant on both sides that would make ring / tree {RATIO:g}, ms: simulated"
    title = f"what {RATIO:g} would take, {max(tokens) / 1e6:g}M tokens on {max(ranks)} GPUs"
    return [
        Table(f"{MACHINE}, simulated: whole steps", headings, rows),
        Table(title, (what,), [(constant,)]),
    ]


def keys(ranks: Sequence[int], tokens: Sequence[int], heads: int, head_dim: int) -> list[Key]:
    """kv_ring, three_allreduce (the paper's tree) and binary_tree (ours), side by side in each case."""
    cases = itertools.product(ranks, tokens, (RING, TREE, OURS))
    return [experiment.decode_key(scheme, size, length, heads, head_dim) for size, length, scheme in cases]


def tables(points: dict[Key, Points]) -> list[Table]:
    """Times, and the ring's over the trees'."""
    headings = (
        "tokens", "ranks", f"{RING}, ms: here", f"{TREE}, ms: here", f"{OURS}, ms: here",
        "ring / tree: here", f"ring / {OURS}: here", "ring / tree, cold: here",
    )  # fmt: skip
    rows, blocks = [], list(points.values())
    for key, *of_case in zip(list(points)[::3], blocks[::3], blocks[1::3], blocks[2::3], strict=True):
        ring, tree, ours = map(experiment.median, of_case)
        cold = experiment.cold(of_case[0]) / experiment.cold(of_case[1])
        rows.append((key.tokens, key.ranks, ring, tree, ours, ring / tree, ring / ours, cold))
    return [Table(f"run here, warm medians; tree: {TREE}", headings, rows)]


EXPERIMENT = Experiment(
    title="time of a decoding step against context length and GPUs, ring against tree",
    where="section 6.1, figure 3",
    model=model,
    measure=experiment.sweep(keys, tables),
    paper=SHAPE | {"tokens": tuple(80_000 << doubling for doubling in range(7)), "ranks": (8, 64, 128)},
    small=SHAPE | {"tokens": (1_000, 4_000, 16_000), "ranks": (2, 4), "effort": EFFORT},
)
