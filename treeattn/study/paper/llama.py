"""Tables 1 and 2 of the paper: Llama models, prefill and ten tokens. Not measured here yet."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from treeattn.study.paper import simulated
from treeattn.study.paper.experiment import Cell, Experiment, Table

__all__ = ["EXPERIMENT", "PUBLISHED", "Series", "implied", "model"]

NOT_MEASURED = "not measured yet"
DECODED = 9  # of ten tokens the first comes from the prefill
BYTES = 2


@dataclass(frozen=True, slots=True)
class Series:
    """One machine's rows: tokens -> seconds with the tree and with the ring, as the paper prints them.

    heads: of the query, which the published ring sends keys and values repeated for. link: what joins two
    of its GPUs, with GB/s each way and their source.
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


LONG = (32_000, 64_000, 128_000, 256_000)
PUBLISHED = (
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
)  # fmt: skip


def implied(series: Series) -> tuple[float, float]:
    """(seconds, GB/s each way) that ring minus tree is: a constant, and, from the slope over the tokens, in
    each decoded token and layer p - 1 hops of a shard's keys and values, repeated for every query head."""
    late = [ring - tree for ring, tree in zip(series.ring, series.tree, strict=True)]
    slope, constant = statistics.linear_regression(series.tokens, late)
    per_token = 2 * series.heads * series.head_dim * BYTES / series.gpus
    return constant, DECODED * series.layers * (series.gpus - 1) * per_token / slope / 1e9


def model(series: Sequence[Series]) -> list[Table]:
    """The paper's tables, and the bandwidth that they imply."""
    headings = (
        "table", "machine", "model", "tokens", "here", "tree, s: paper", "ring, s: paper",
        "ring / tree: paper",
    )  # fmt: skip
    rows: list[tuple[Cell, ...]] = [
        (one.table, one.machine, one.model, tokens, NOT_MEASURED, tree, ring, ring / tree)
        for one in series
        for tokens, tree, ring in zip(one.tokens, one.tree, one.ring, strict=True)
    ]
    found = ("GB/s each way: model, from the paper's times", "constant part, s: model", "the link, GB/s")
    links: list[tuple[Cell, ...]] = [(one.machine, *reversed(implied(one)), one.link) for one in series]
    return [
        Table("as the paper prints them", headings, rows),
        Table("ring minus tree as the time of one link", ("machine", *found), links),
    ]


EXPERIMENT = Experiment(
    title="Llama models: prefill and ten tokens, ring against tree",
    where="tables 1 and 2",
    model=model,
    simulated=simulated.llama,
    paper={"series": PUBLISHED},
)
