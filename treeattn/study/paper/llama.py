"""Tables 1 and 2 of the paper: Llama models, prefill and ten tokens, ring against tree.

The paper's settings are priced on simulated clusters; rows of one setting have the same prefill.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from treeattn.collectives.clusters import description
from treeattn.study.decode_step import StepShape, attention_cost, kv_ring_cost, reduction_cost
from treeattn.study.paper.experiment import MACHINE, Table, placed

#: The paper's name of a machine -> its description.
MACHINES = {"8 H100": MACHINE, "4 MI300X": "mi300x", "2 RTX 4090": "dual-4090"}
DECODED = 9  # of ten tokens the first comes from the prefill
BYTES = 2


@dataclass(frozen=True, slots=True)
class Series:
    """One machine's rows: tokens -> seconds with the tree and with the ring, as the paper prints them.

    heads: of the query, which the published ring sends keys and values repeated for. link: what joins two of
    its GPUs, with GB/s each way and their source.
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
        1, "8 H100", "Llama 3.1 8B", 8, 32, 32, 128,
        "NVLink 4: 371 to 377 in copies (NVIDIA/nccl#1264)",
        LONG, (0.60, 1.08, 2.68, 2.89), (2.57, 4.42, 6.38, 8.19),
    ),
    Series(
        1, "4 MI300X", "Llama 3.1 8B", 4, 32, 32, 128,
        "one xGMI link: 48 in copies (AMD ROCm blog)",
        LONG, (1.05, 2.36, 6.43, 15.30), (3.57, 7.33, 16.40, 35.12),
    ),
    Series(
        2, "2 RTX 4090", "Llama 3.2 1B", 2, 16, 32, 64,
        "PCIe 4 x16: 26 on paper",
        (8_000, 16_000, 20_000, 32_000), (0.34, 0.58, 0.74, 1.01), (1.38, 2.77, 3.47, 5.45),
    ),
)  # fmt: skip


TITLE = "Llama models: prefill and ten tokens, ring against tree"
WHERE = "tables 1 and 2"
PAPER = {"series": PUBLISHED}


def implied(series: Series) -> tuple[float, float]:
    """(seconds, GB/s each way) that ring minus tree is: a constant, and, from the slope over the tokens, in
    each decoded token and layer p - 1 hops of a shard's keys and values, repeated for every query head."""
    late = [ring - tree for ring, tree in zip(series.ring, series.tree, strict=True)]
    slope, constant = statistics.linear_regression(series.tokens, late)
    per_token = 2 * series.heads * series.head_dim * BYTES / series.gpus
    return constant, DECODED * series.layers * (series.gpus - 1) * per_token / slope / 1e9


def model(series: Sequence[Series]) -> list[Table]:
    """The paper's tables, the bandwidth that they imply, and simulated steps."""
    rows: list[dict[str, Any]] = [
        {
            "table": one.table, "machine": one.machine, "model": one.model, "tokens": tokens,
            "tree, s: paper": tree, "ring, s: paper": ring, "ring / tree: paper": ring / tree,
        }
        for one in series
        for tokens, tree, ring in zip(one.tokens, one.tree, one.ring, strict=True)
    ]  # fmt: skip
    links: list[dict[str, Any]] = []
    for one in series:
        constant, bandwidth = implied(one)
        links.append({
            "machine": one.machine, "GB/s each way: model, from the paper's times": bandwidth,
            "constant part, s: model": constant, "the link, GB/s": one.link,
        })  # fmt: skip
    return [
        Table("as the paper prints them", rows),
        Table("ring minus tree as the time of one link", links),
        Table("simulated: what the ring takes longer, prefill left out", simulated(series)),
    ]


def simulated(series: Sequence[Series]) -> list[dict[str, Any]]:
    """Seconds by which the ring is later than the tree, of nine tokens in all layers, the ring with keys and
    values repeated for every query head, as published; prefill left out."""
    rows: list[dict[str, Any]] = []
    for one in series:
        cluster = description.load(MACHINES[one.machine])
        schedule, places = placed(cluster, "hierarchical", one.gpus)
        for tokens, tree, ring in zip(one.tokens, one.tree, one.ring, strict=True):
            shape = StepShape(tokens, one.heads, one.heads, one.head_dim)
            by_tree = attention_cost(cluster, one.gpus, shape) + reduction_cost(
                cluster, places, schedule, shape
            )
            late = kv_ring_cost(cluster, places, shape).time - by_tree.time
            rows.append({
                "machine": one.machine,
                "model": one.model,
                "tokens": tokens,
                "ring minus tree, s: paper": ring - tree,
                "ring minus tree, s: simulated": DECODED * one.layers * late / 1e6,
            })  # fmt: skip
    return rows
