"""Steps of a reduction against the logarithm of the number of ranks: Theorem 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from treeattn import collectives
from treeattn.study import laws
from treeattn.study.compare.measure import Effort
from treeattn.study.compare.schema import Key
from treeattn.study.paper import measured
from treeattn.study.paper.experiment import Cell, Experiment, Table
from treeattn.study.paper.machines import DGX_H100

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["Steps", "StepsSetting", "certified"]


EFFORT = Effort(repetitions=3, iterations=50, seconds=0.1)


@dataclass(frozen=True, slots=True)
class StepsSetting:
    """schemes: of the catalogue, each for all `ranks`, in nodes of 8 where a scheme asks for nodes."""

    ranks: tuple[int, ...]
    schemes: tuple[str, ...]
    heads: int = 16
    head_dim: int = 128


def certified(scheme: str, ranks: int) -> collectives.Certificate:
    """What is proved of the schedule: rounds, and depth, its longest chain of merges."""
    gpus = DGX_H100.gpus_per_node
    nodes = {"nodes": "+".join([str(gpus)] * (ranks // gpus))} if collectives.needs_nodes(scheme) else {}
    return collectives.check(collectives.build(scheme, ranks, **nodes))


@dataclass(frozen=True)
class Steps(Experiment):
    """Depth and rounds of our schedules. Nothing is assumed: schedules are proved for any number of ranks."""

    name: ClassVar[str] = "steps"
    title: ClassVar[str] = "steps of a reduction against log p"
    where: ClassVar[str] = "section 5.1, Theorem 1: O(N/p + log p)"
    differences: ClassVar[tuple[str, ...]] = (
        "Theorem 1 counts merges that must follow one another: the depth. k_nomial_tree and "
        "recursive_doubling have the logarithm itself. In binary_tree a parent merges two children one after "
        "the other: up to twice the logarithm, O(log p) all the same. chain has p - 1",
        "bringing the result back to every rank, which the theorem leaves out, doubles the rounds of a tree; "
        "recursive_doubling needs none for it",
        "the paper's all-reductions are NCCL's and need not have log p steps: its tree is a chain "
        "within a node, 22 messages one after the other on 128 GPUs (NCCL 2.30.7, src/graph/tuning.cc), and "
        "that for each of three all-reductions",
    )

    paper: StepsSetting = StepsSetting(
        (8, 64, 128),
        ("k_nomial_tree", "recursive_doubling", "binary_tree", "double_binary_tree", "hierarchical", "chain"),
    )
    small: StepsSetting = StepsSetting(
        (2, 3, 4, 8), ("k_nomial_tree", "recursive_doubling", "binary_tree", "hierarchical", "chain")
    )
    effort: Effort = EFFORT

    def model(self) -> list[Table]:
        """Proved for the paper's numbers of ranks, beside the theorem's."""
        rows: list[tuple[Cell, ...]] = []
        for ranks in self.paper.ranks:
            least = laws.reduction_steps(ranks, ranks)
            for scheme in self.paper.schemes:
                proved = certified(scheme, ranks)
                log = f"O(log p), log2 p = {ranks.bit_length() - 1}"
                rows.append((ranks, scheme, proved.depth, proved.rounds, log, least))
            rows.append((ranks, "NCCL's tree", None, None, None, DGX_H100.allreduce_hops(ranks)))
        headings = (
            "ranks", "scheme", "depth: here, proved", "rounds: here, proved", "steps: paper",
            "steps: model (NCCL: hops up and down)",
        )  # fmt: skip
        return [Table("the paper's numbers of GPUs, one token on each", headings, tuple(rows))]

    def measure(self, comm: Intracomm) -> list[Table]:
        """Reductions alone, on the ranks of this job."""
        small = self.small
        shape = 1, 1, small.heads, small.heads, small.head_dim, "bfloat16"
        keys = [
            Key("reduce", scheme, ranks, 0, *shape)
            for ranks in measured.sizes(comm, small.ranks)
            for scheme in small.schemes
        ]
        rows: list[tuple[Cell, ...]] = []
        found = measured.run(comm, keys, self.effort)
        for key in keys if found else ():
            points = found[key]
            first = points[0]
            least = laws.reduction_steps(key.ranks, key.ranks)
            microseconds = 1000 * measured.median(points)
            rows.append((key.ranks, key.scheme, first["depth"], first["rounds"], least, microseconds))
        headings = ("ranks", "scheme", "depth: here", "rounds: here", "steps: model", "µs: here")
        return [Table("run here: the reduction alone, 16 x 128", headings, tuple(rows))] if rows else []
