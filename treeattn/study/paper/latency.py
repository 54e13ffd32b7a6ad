"""Time of one decoding step against context length and number of GPUs: the ring against the tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from treeattn.study import laws
from treeattn.study.compare.measure import Effort
from treeattn.study.compare.schema import Key
from treeattn.study.paper import measured
from treeattn.study.paper.experiment import Claim, Experiment, Table
from treeattn.study.paper.machines import DGX_H100, Machine

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["Latency", "LatencySetting", "Predicted", "constant_for", "predict"]

BYTES = 2  # of an element of a bfloat16 cache
EFFORT = Effort(repetitions=5, iterations=20, seconds=0.2)
RING, TREE, OURS = "kv_ring", "three_allreduce", "binary_tree"


@dataclass(frozen=True, slots=True)
class LatencySetting:
    """tokens: over all ranks."""

    tokens: tuple[int, ...]
    ranks: tuple[int, ...]
    heads: int
    head_dim: int
    dtype: str


class Predicted(NamedTuple):
    """Microseconds of the parts of a step, and of the steps."""

    attention: float
    hop: float
    ring: float
    tree: float


def predict(
    tokens: int, gpus: int, heads: int = 16, head_dim: int = 128, machine: Machine = DGX_H100
) -> Predicted:
    """One step of a bfloat16 cache. The ring sends a shard p - 1 times over its slowest link, computing
    meanwhile; the tree reads its shard and makes three small all-reductions (the paper's Algorithm 3)."""
    shard = laws.shard_elements(1, tokens, heads, head_dim) * BYTES / gpus
    attention = machine.reading(shard)
    hop = shard / (1e3 * machine.slowest_link(gpus).reached) + machine.ring_step
    ring = (gpus - 1) * max(hop, attention) + attention
    return Predicted(attention, hop, ring, attention + 3 * machine.small_allreduce(gpus))


def constant_for(ratio: float, predicted: Predicted) -> float:
    """The microseconds that, added to both steps, would make ring / tree `ratio`."""
    return (predicted.ring - ratio * predicted.tree) / (ratio - 1)


@dataclass(frozen=True)
class Latency(Experiment):
    """Ring against tree, warm and cold."""

    name: ClassVar[str] = "latency"
    title: ClassVar[str] = "time of a decoding step against context length and GPUs, ring against tree"
    where: ClassVar[str] = "section 6.1, figure 3"
    claims: ClassVar[tuple[Claim, ...]] = (
        Claim("ring / tree", "close to 8", 8.0, "", "section 6.1: 128 GPUs, 5.12M tokens; abstract: up to 8"),
    )
    assumptions: ClassVar[tuple[str, ...]] = (
        "an H100's share of a bfloat16 cache is read once, at 75 % of its memory bandwidth",
        "ring: p - 1 hops, computation and communication fully overlapped, the slowest link sets the pace",
        "tree: three NCCL all-reductions one after the other, a few KiB each, so latency alone counts",
        *DGX_H100.sources,
    )
    differences: ClassVar[tuple[str, ...]] = (
        "the paper's 8 is NOT EXPLAINED: no model of communication gives it. Whatever the constants, ring / "
        "tree tends to p x (memory bandwidth / slowest link) in long contexts, thousands on 128 GPUs",
        "a constant on both sides would give it; the published scripts (tree_shard_test.py and "
        "ring_shard_test.py of Zyphra/tree_attention) time one first call of a function that is compiled in "
        "that call and sets up NCCL in it. How the figure itself was made cannot be seen from here",
        "here: every rank of a ring reads every shard, p times what a rank of a tree reads, before a byte "
        "travels. Cold is planning and the first call, warm the median of later calls. Ranks of one node "
        "share memory: a hop is a copy, not a link, and computing and copying compete for the same cores",
    )

    paper: LatencySetting = LatencySetting(
        tokens=tuple(80_000 << doubling for doubling in range(7)),
        ranks=(8, 64, 128),
        heads=16,
        head_dim=128,
        dtype="bfloat16",
    )
    small: LatencySetting = LatencySetting((1_000, 4_000, 16_000), (2, 4), 16, 128, "bfloat16")
    effort: Effort = EFFORT

    def model(self) -> list[Table]:
        """Times of the model, and its ratio beside the paper's."""
        paper, claim = self.paper, self.claim("ring / tree")
        headings = (
            "tokens", "GPUs", "attention, ms: model", "ring, ms: model", "tree, ms: model",
            "ring / tree: here", "ring / tree: paper", "ring / tree: model",
        )  # fmt: skip
        rows = []
        for tokens in paper.tokens:
            for gpus in paper.ranks:
                step = predict(tokens, gpus, paper.heads, paper.head_dim)
                largest = (tokens, gpus) == (max(paper.tokens), max(paper.ranks))
                says = claim.says if largest else "in the figure"
                times = (value / 1000 for value in (step.attention, step.ring, step.tree))
                rows.append((tokens, gpus, *times, None, says, step.ring / step.tree))
        largest_step = predict(max(paper.tokens), max(paper.ranks), paper.heads, paper.head_dim)
        constant = constant_for(claim.value, largest_step) / 1000
        what = "constant on both sides that would make ring / tree 8, ms: model"
        return [
            Table("the paper's setting", headings, tuple(rows)),
            Table("what 8 would take, 5.12M tokens on 128 GPUs", (what,), ((constant,),)),
        ]

    def measure(self, comm: Intracomm) -> list[Table]:
        """kv_ring, three_allreduce (the paper's tree) and binary_tree (ours), interleaved."""
        small = self.small
        cases = [(ranks, tokens) for ranks in measured.sizes(comm, small.ranks) for tokens in small.tokens]
        schemes = (RING, TREE, OURS)
        keys = [self._key(scheme, *case) for case in cases for scheme in schemes]
        points = measured.run(comm, keys, self.effort)
        if not points:
            return []
        rows: list[tuple[Any, ...]] = []
        for ranks, tokens in cases:
            of = [points[self._key(scheme, ranks, tokens)] for scheme in schemes]
            ring, tree, ours = map(measured.median, of)
            first = measured.cold(of[0]) / measured.cold(of[1])
            rows.append((tokens, ranks, ring, tree, ours, ring / tree, ring / ours, first))
        headings = (
            "tokens", "ranks", f"{RING}, ms: here", f"{TREE}, ms: here", f"{OURS}, ms: here",
            "ring / tree: here", f"ring / {OURS}: here", "ring / tree, cold: here",
        )  # fmt: skip
        return [Table("run here, warm medians; tree: three_allreduce", headings, tuple(rows))]

    def _key(self, scheme: str, ranks: int, tokens: int) -> Key:
        small = self.small
        return measured.decode_key(scheme, ranks, tokens, small.heads, small.head_dim, small.dtype)
