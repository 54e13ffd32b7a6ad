"""What travels: equations 10 to 14, and the example of section 6.3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from treeattn.study import laws
from treeattn.study.compare.measure import Effort
from treeattn.study.paper import measured
from treeattn.study.paper.experiment import Cell, Claim, Experiment, Table
from treeattn.study.paper.machines import DGX_H100

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["Volume", "VolumeSetting", "law"]

EFFORT = Effort(repetitions=1, iterations=3, seconds=0.01)
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


@dataclass(frozen=True, slots=True)
class VolumeSetting:
    """tokens: over all ranks."""

    tokens: int
    ranks: tuple[int, ...]
    heads: int
    head_dim: int


def law(scheme: str, ranks: int, tokens: int, heads: int, head_dim: int) -> float:
    """Elements that a rank sends by the equation that the scheme is held against."""
    if SCHEMES[scheme] == "14":
        return float(laws.tree_volume(1, heads, head_dim, ranks))
    hops = ranks if SCHEMES[scheme] == "10" else ranks - 1
    return laws.ring_volume(1, tokens, heads, head_dim, hops) / ranks


@dataclass(frozen=True)
class Volume(Experiment):
    """The example of section 6.3, and payload counted where it is handed to MPI."""

    name: ClassVar[str] = "volume"
    title: ClassVar[str] = "communication volume, and whether a ring can hide it behind computation"
    where: ClassVar[str] = "section 6.3, equations 10 to 14"
    claims: ClassVar[tuple[Claim, ...]] = (
        Claim("attention of one shard", "O(1e-5)", 1e-5, "s", "section 6.3"),
        Claim("one hop", "O(1e-3)", 1e-3, "s", "section 6.3"),
    )
    assumptions: ClassVar[tuple[str, ...]] = (
        "640000 tokens on 8 GPUs of one DGX H100, hidden size 2048, bfloat16",
        "floor of attention: every key and value is read once at the memory bandwidth on paper, 3350 GB/s; "
        "hop: NVLink at 370 GB/s reached",
    )
    differences: ClassVar[tuple[str, ...]] = (
        "O(1e-5) s for the attention of a shard is NOT EXPLAINED: reading it takes at least 196 µs; in 10 µs "
        "the memory would have to deliver 66 TB/s. The conclusion stands: a hop takes several times as long "
        "as the computation that it would have to hide behind, 9 times (7 at NVLink's peak) rather than "
        "100",
        "equation 10 calls 2btdp the volume between devices: it is what one device sends in p hops, and "
        "p - 1 are enough. Equation 14 is per device too",
        "here: payload is counted where it is handed to MPI. Equation 14 is kept by every rank in ring and "
        "reduce_scatter_gather where p divides the heads, on average in trees; recursive_doubling buys few "
        "rounds with more bytes; of three_allreduce only what goes in is known, the library decides the rest",
    )

    paper: VolumeSetting = VolumeSetting(640_000, (8,), 16, 128)
    small: VolumeSetting = VolumeSetting(4_000, (2, 4), 16, 128)
    effort: Effort = EFFORT

    def model(self) -> list[Table]:
        """Section 6.3's example."""
        (ranks,), paper = self.paper.ranks, self.paper
        shape = paper.heads, paper.head_dim
        shard = laws.shard_elements(1, paper.tokens // ranks, *shape) * CACHE
        floor = shard / (DGX_H100.memory * 1e9)
        hop = shard / (DGX_H100.within.reached * 1e9)
        tokens = paper.tokens // ranks
        ring, least = (laws.ring_volume(1, tokens, *shape, hops) for hops in (ranks, ranks - 1))
        tree = float(laws.tree_volume(1, *shape, ranks))
        attention, message = self.claim("attention of one shard").says, self.claim("one hop").says
        rows: tuple[tuple[Cell, ...], ...] = (
            ("keys and values of a shard, bytes (eq. 11)", None, "2btd", shard),
            ("attention of a shard, s", None, attention, floor),
            ("one hop to the next GPU, s", None, message, hop),
            ("hop / attention", None, "about 100 (from the two above)", hop / floor),
            ("ring, p hops: elements that a GPU sends", None, "2btdp (eq. 10)", ring),
            ("ring, p - 1 hops: elements that a GPU sends", None, None, least),
            ("tree: elements that a GPU sends", None, "2(p-1)/p (bd + 2bn_h) (eq. 14)", tree),
            ("ring / tree, p - 1 hops", None, None, least / tree),
        )
        headings = ("640000 tokens, 8 GPUs, hidden size 2048", "here", "paper", "model")
        return [Table("the example of section 6.3", headings, rows)]

    def measure(self, comm: Intracomm) -> list[Table]:
        """Payload of every scheme of `SCHEMES`, one step."""
        small = self.small
        shape = small.heads, small.head_dim
        keys = [
            measured.decode_key(scheme, ranks, small.tokens, *shape, "bfloat16")
            for ranks in measured.sizes(comm, small.ranks)
            for scheme in SCHEMES
        ]
        found = measured.run(comm, keys, self.effort)
        rows: list[tuple[Cell, ...]] = []
        for key in keys if found else ():
            size = CACHE if key.scheme.startswith("kv_ring") else RECORD
            total = measured.payload(found[key])
            here = None if total is None else total / key.ranks / size
            model = law(key.scheme, key.ranks, small.tokens, *shape)
            share = None if here is None else here / model
            rows.append((key.ranks, key.scheme, SCHEMES[key.scheme], here, model, share))
        headings = (
            "ranks", "scheme", "equation", "elements a rank sends, mean: here", "elements: model",
            "here / model",
        )  # fmt: skip
        title = f"run here, {small.tokens} tokens, hidden size {small.heads * small.head_dim}"
        return [Table(title, headings, tuple(rows))] if rows else []
