"""Steps of a reduction against the logarithm of the number of ranks: Theorem 1."""

from __future__ import annotations

from collections.abc import Sequence

from treeattn import collectives
from treeattn.collectives.clusters import description
from treeattn.collectives.clusters.simulate import simulate
from treeattn.study import laws
from treeattn.study.compare.measure import Effort
from treeattn.study.compare.rows import Key
from treeattn.study.paper import experiment
from treeattn.study.paper.experiment import MACHINE, Cell, Experiment, Points, Table

EFFORT = Effort(repetitions=3, iterations=50, seconds=0.1)
GPUS = 8  # of a node
SCHEMES = ("k_nomial_tree", "recursive_doubling", "binary_tree", "hierarchical", "chain")


def certified(scheme: str, ranks: int) -> collectives.Certificate:
    """What is proved of the schedule: rounds, and depth, its longest chain of merges."""
    nodes = "+".join([str(GPUS)] * (ranks // GPUS)) if collectives.needs_nodes(scheme) else None
    return collectives.check(collectives.build(scheme, ranks, nodes=nodes))


def nccl_hops(gpus: int) -> int:
    """Messages one after the other in NCCL's tree: a chain within nodes, a binary tree between them, up and
    down (NCCL 2.30.7, src/graph/tuning.cc)."""
    return 2 * (GPUS - 1 + (gpus // GPUS).bit_length() - 1)


def model(ranks: Sequence[int], schemes: Sequence[str]) -> list[Table]:
    """Proved for the paper's numbers of GPUs, beside the theorem's; NCCL's tree last. Then simulated times of
    a reduction of 16 x 128, beside the floor."""
    headings = (
        "ranks", "scheme", "depth: here, proved", "rounds: here, proved", "steps: paper",
        "steps: model (NCCL: hops up and down)",
    )  # fmt: skip
    cluster = description.load(MACHINE)
    rows: list[tuple[Cell, ...]] = []
    times: list[tuple[Cell, ...]] = []
    for size in ranks:
        least = laws.reduction_steps(size, size)
        for scheme in schemes:
            found = certified(scheme, size)
            log = f"O(log p), log2 p = {size.bit_length() - 1}"
            rows.append((size, scheme, found.depth, found.rounds, log, least))
            schedule, places = experiment.placed(cluster, scheme, size)
            simulation = simulate(schedule, cluster, places)
            times.append((size, scheme, simulation.time, simulation.bound))
        rows.append((size, "NCCL's tree", None, None, None, nccl_hops(size)))
    priced = ("ranks", "scheme", "µs: simulated", "no scheme is faster than, µs: simulated")
    return [
        Table("the paper's numbers of GPUs, one token on each", headings, rows),
        Table(f"{MACHINE}, simulated: the reduction alone, 16 x 128", priced, times),
    ]


def keys(ranks: Sequence[int], schemes: Sequence[str], heads: int, head_dim: int) -> list[Key]:
    """Reductions alone."""
    shape = 0, 1, 1, heads, heads, head_dim, "bfloat16"
    return [Key("reduce", scheme, size, *shape) for size in ranks for scheme in schemes]


def tables(points: dict[Key, Points]) -> list[Table]:
    """Depth and rounds as the harness found them, and times."""
    rows: list[tuple[Cell, ...]] = []
    for key, blocks in points.items():
        steps = blocks[0]["depth"], blocks[0]["rounds"], laws.reduction_steps(key.ranks, key.ranks)
        rows.append((key.ranks, key.scheme, *steps, 1000 * experiment.median(blocks)))
    headings = ("ranks", "scheme", "depth: here", "rounds: here", "steps: model", "µs: here")
    return [Table(f"run here: the reduction alone, {key.heads} x {key.head_dim}", headings, rows)]


EXPERIMENT = Experiment(
    title="steps of a reduction against log p",
    where="section 5.1, Theorem 1: O(N/p + log p)",
    model=model,
    measure=experiment.sweep(keys, tables),
    paper={"ranks": (8, 64, 128), "schemes": (*SCHEMES[:3], "double_binary_tree", *SCHEMES[3:])},
    small={"ranks": (2, 3, 4, 8), "schemes": SCHEMES, "heads": 16, "head_dim": 128, "effort": EFFORT},
)
