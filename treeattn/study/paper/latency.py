"""Time of one decoding step against context length and number of GPUs: the ring against the tree."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from treeattn.study import laws
from treeattn.study.compare.measure import Effort
from treeattn.study.compare.schema import Key
from treeattn.study.paper import machines, measured, simulated
from treeattn.study.paper.experiment import IN_THE_FIGURE, Cell, Experiment, Table
from treeattn.study.paper.measured import Points

BYTES = 2  # of an element of a bfloat16 cache
SHAPE = {"heads": 16, "head_dim": 128}
EFFORT = Effort(repetitions=5, iterations=20, seconds=0.2)
RING, TREE, OURS = "kv_ring", "three_allreduce", "binary_tree"

#: Ring / tree in the paper's largest setting, 5.12M tokens on 128 GPUs: "close to 8" in section 6.1.
RATIO = 8.0


class Predicted(NamedTuple):
    """Microseconds of the parts of a step, and of the steps."""

    attention: float
    hop: float
    ring: float
    tree: float


def predict(tokens: int, gpus: int, heads: int = 16, head_dim: int = 128) -> Predicted:
    """One step of a bfloat16 cache. The ring sends a shard p - 1 times over its slowest link, computing
    meanwhile; the tree reads its shard and makes three small all-reductions (the paper's Algorithm 3)."""
    shard = laws.shard_elements(1, tokens, heads, head_dim) * BYTES / gpus
    attention = shard / (1e3 * machines.MEMORY * machines.MEMORY_SHARE)
    slowest = machines.WITHIN if machines.nodes(gpus) == 1 else machines.BETWEEN
    hop = shard / (1e3 * slowest.reached) + machines.RING_STEP
    ring = (gpus - 1) * max(hop, attention) + attention
    return Predicted(attention, hop, ring, attention + 3 * machines.small_allreduce(gpus))


def constant_for(ratio: float, predicted: Predicted) -> float:
    """The microseconds that, added to both steps, would make ring / tree `ratio`."""
    return (predicted.ring - ratio * predicted.tree) / (ratio - 1)


def model(tokens: Sequence[int], ranks: Sequence[int], heads: int, head_dim: int) -> list[Table]:
    """Times of the model, and its ratio beside the paper's. tokens: over all ranks."""
    largest = max(tokens), max(ranks)
    headings = (
        "tokens", "GPUs", "attention, ms: model", "ring, ms: model", "tree, ms: model",
        "ring / tree: here", "ring / tree: paper", "ring / tree: model",
    )  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    for case in itertools.product(tokens, ranks):
        step = predict(*case, heads, head_dim)
        times = (value / 1000 for value in (step.attention, step.ring, step.tree))
        says = f"close to {RATIO:g}" if case == largest else IN_THE_FIGURE
        rows.append((*case, *times, None, says, step.ring / step.tree))
    constant = constant_for(RATIO, predict(*largest, heads, head_dim)) / 1000
    what = f"constant on both sides that would make ring / tree {RATIO:g}, ms: model"
    title = f"what {RATIO:g} would take, {largest[0] / 1e6:g}M tokens on {largest[1]} GPUs"
    return [Table("the paper's setting", headings, rows), Table(title, (what,), [(constant,)])]


def keys(ranks: Sequence[int], tokens: Sequence[int], heads: int, head_dim: int) -> list[Key]:
    """kv_ring, three_allreduce (the paper's tree) and binary_tree (ours), side by side in each case."""
    cases = itertools.product(ranks, tokens, (RING, TREE, OURS))
    return [measured.decode_key(scheme, size, length, heads, head_dim) for size, length, scheme in cases]


def tables(points: dict[Key, Points]) -> list[Table]:
    """Times, and the ring's over the trees'."""
    headings = (
        "tokens", "ranks", f"{RING}, ms: here", f"{TREE}, ms: here", f"{OURS}, ms: here",
        "ring / tree: here", f"ring / {OURS}: here", "ring / tree, cold: here",
    )  # fmt: skip
    rows, blocks = [], list(points.values())
    for key, *of_case in zip(list(points)[::3], blocks[::3], blocks[1::3], blocks[2::3], strict=True):
        ring, tree, ours = map(measured.median, of_case)
        cold = measured.cold(of_case[0]) / measured.cold(of_case[1])
        rows.append((key.tokens, key.ranks, ring, tree, ours, ring / tree, ring / ours, cold))
    return [Table(f"run here, warm medians; tree: {TREE}", headings, rows)]


EXPERIMENT = Experiment(
    title="time of a decoding step against context length and GPUs, ring against tree",
    where="section 6.1, figure 3",
    model=model,
    simulated=simulated.latency,
    measure=measured.sweep(keys, tables),
    paper=SHAPE | {"tokens": tuple(80_000 << doubling for doubling in range(7)), "ranks": (8, 64, 128)},
    small=SHAPE | {"tokens": (1_000, 4_000, 16_000), "ranks": (2, 4), "effort": EFFORT},
)
