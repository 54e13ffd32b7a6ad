"""Time of one decoding step against context length and number of GPUs: the ring against the tree."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from treeattn.study.compare.measure import Effort
from treeattn.study.compare.schema import Key
from treeattn.study.paper import experiment, simulated
from treeattn.study.paper.experiment import Experiment, Points, Table

SHAPE = {"heads": 16, "head_dim": 128}
EFFORT = Effort(repetitions=5, iterations=20, seconds=0.2)
RING, TREE, OURS = "kv_ring", "three_allreduce", "binary_tree"


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
    model=simulated.latency,
    measure=experiment.sweep(keys, tables),
    paper=SHAPE | {"tokens": tuple(80_000 << doubling for doubling in range(7)), "ranks": (8, 64, 128)},
    small=SHAPE | {"tokens": (1_000, 4_000, 16_000), "ranks": (2, 4), "effort": EFFORT},
)
