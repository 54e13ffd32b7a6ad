"""Tables 1 and 2 of the paper: Llama models, prefill and ten tokens. Not measured here yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from treeattn.study.paper.experiment import Cell, Experiment, Table

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["Llama", "LlamaSetting", "Series", "implied", "line"]

NOT_MEASURED = "not measured yet"
DECODED = 9  # of ten tokens the first comes from the prefill
BYTES = 2


@dataclass(frozen=True, slots=True)
class Series:
    """One machine's rows: tokens -> seconds with the tree and with the ring, as the paper prints them.

    heads: of the query, which the published ring sends keys and values repeated for.
    """

    table: int
    machine: str
    model: str
    gpus: int
    layers: int
    heads: int
    head_dim: int
    link: str
    tokens: tuple[int, ...]
    tree: tuple[float, ...]
    ring: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LlamaSetting:
    """The series of an experiment."""

    series: tuple[Series, ...]


LONG = (32_000, 64_000, 128_000, 256_000)
PUBLISHED = LlamaSetting(
    (
        Series(
            1, "8 H100", "Llama 3.1 8B", 8, 32, 32, 128, "NVLink 4: 371 to 377 in copies (NVIDIA/nccl#1264)",
            LONG, (0.60, 1.08, 2.68, 2.89), (2.57, 4.42, 6.38, 8.19),
        ),
        Series(
            1, "4 MI300X", "Llama 3.1 8B", 4, 32, 32, 128, "one xGMI link: 48 in copies (AMD ROCm blog)",
            LONG, (1.05, 2.36, 6.43, 15.30), (3.57, 7.33, 16.40, 35.12),
        ),
        Series(
            2, "2 RTX 4090", "Llama 3.2 1B", 2, 16, 32, 64, "PCIe 4 x16: 26 on paper",
            (8_000, 16_000, 20_000, 32_000), (0.34, 0.58, 0.74, 1.01), (1.38, 2.77, 3.47, 5.45),
        ),
    )
)  # fmt: skip


def line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """(intercept, slope) of the least squares through the points."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - mean_x) ** 2 for a in x)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    return mean_y - slope * mean_x, slope


def implied(series: Series) -> tuple[float, float]:
    """(seconds, GB/s each way) that ring minus tree is: a constant, and the time of the ring's hops.

    In each of the decoded tokens and each layer, p - 1 hops of a shard's keys and values, repeated for every
    query head as the published ring sends them; per token of context, hence from the slope alone.
    """
    late = [ring - tree for ring, tree in zip(series.ring, series.tree, strict=True)]
    constant, slope = line(series.tokens, late)
    per_token = 2 * series.heads * series.head_dim * BYTES / series.gpus
    return constant, DECODED * series.layers * (series.gpus - 1) * per_token / slope / 1e9


@dataclass(frozen=True)
class Llama(Experiment):
    """Whole models: what the paper prints, and what its ring minus tree would take of a link."""

    name: ClassVar[str] = "llama"
    title: ClassVar[str] = "Llama models: prefill and ten tokens, ring against tree"
    where: ClassVar[str] = "tables 1 and 2"
    assumptions: ClassVar[tuple[str, ...]] = (
        "implied bandwidth: ring minus tree is a constant plus the time of p - 1 hops in each of 9 decoded "
        "tokens and each layer, keys and values in 16 bits repeated for every query head; the slope over the "
        "length gives GB/s each way",
    )
    differences: ClassVar[tuple[str, ...]] = (
        "here: not measured yet, this version runs no Llama model",
        "on H100 and MI300X the tables look like the bandwidth of one link: the implied bandwidths lie "
        "within a fifth of what those links reach in copies. The published ring sends keys and values "
        "repeated for 32 query heads where the model has 8 KV heads: without that it would send a quarter",
        "the constant part on 8 H100, 2 seconds, is not explained; nor is a bandwidth on 2 RTX 4090 that is "
        "several times below PCIe 4",
    )

    paper: LlamaSetting = PUBLISHED
    small: None = None

    def model(self) -> list[Table]:
        """The paper's tables, and the bandwidth that they imply."""
        rows: list[tuple[Cell, ...]] = []
        links: list[tuple[Cell, ...]] = []
        for series in self.paper.series:
            for tokens, tree, ring in zip(series.tokens, series.tree, series.ring, strict=True):
                what = series.table, series.machine, series.model, tokens
                rows.append((*what, NOT_MEASURED, tree, ring, ring / tree))
            constant, bandwidth = implied(series)
            links.append((series.machine, bandwidth, constant, series.link))
        headings = (
            "table", "machine", "model", "tokens", "here", "tree, s: paper", "ring, s: paper",
            "ring / tree: paper",
        )  # fmt: skip
        found = ("GB/s each way: model, from the paper's times", "constant part, s: model")
        return [
            Table("as the paper prints them", headings, tuple(rows)),
            Table(
                "ring minus tree as the time of one link", ("machine", *found, "the link, GB/s"), tuple(links)
            ),
        ]

    def measure(self, comm: Intracomm) -> list[Table]:
        """Nothing yet."""
        return []
