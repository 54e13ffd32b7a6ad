"""The paper's experiments: Shyam et al., "Tree Attention", arXiv 2408.04093v4.

What the paper's equations and the simulator say of its settings, beside its own numbers. `treeattn compare`
measures times, tests/mpi/test_laws.py what ranks hold and send. docs/paper.md explains.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from treeattn import collectives
from treeattn.collectives import Schedule
from treeattn.collectives.clusters import description, placement
from treeattn.collectives.clusters.description import Cluster
from treeattn.study import laws
from treeattn.study.decode_step import (
    StepShape,
    attention_cost,
    kv_ring_cost,
    query_ring_exchange,
    reduction_cost,
)

#: The shipped description of the paper's cluster.
MACHINE = "dgx-h100"

#: Title -> rows: by heading, which names the unit and says whose number it is, a number, words in place of
#: one, or None: not said.
Tables = dict[str, list[dict[str, Any]]]

_CACHE = 2  # bytes of an element of keys and values
_GPUS = 8  # of a node
_DECODED = 9  # of ten tokens the first comes from the prefill


class Experiment(NamedTuple):
    """where: its place in the paper. paper: its settings, with which `model` gives the tables."""

    title: str
    where: str
    paper: dict[str, Any]
    model: Callable[..., Tables]


@dataclass(frozen=True, slots=True)
class Series:
    """One machine's rows: tokens -> seconds with the tree and with the ring, as the paper prints them.

    cluster: its description. heads: of the query, which the published ring sends keys and values repeated
    for. link: what joins two of its GPUs, with GB/s each way and their source.
    """

    table: int
    machine: str
    cluster: str
    model: str
    gpus: int
    layers: int
    heads: int
    head_dim: int
    link: str
    tokens: Sequence[int]
    tree: Sequence[float]
    ring: Sequence[float]


_LONG = (32_000, 64_000, 128_000, 256_000)
PUBLISHED = (
    Series(
        1, "8 H100", MACHINE, "Llama 3.1 8B", 8, 32, 32, 128,
        "NVLink 4: 371 to 377 in copies (NVIDIA/nccl#1264)",
        _LONG, (0.60, 1.08, 2.68, 2.89), (2.57, 4.42, 6.38, 8.19),
    ),
    Series(
        1, "4 MI300X", "mi300x", "Llama 3.1 8B", 4, 32, 32, 128,
        "one xGMI link: 48 in copies (AMD ROCm blog)",
        _LONG, (1.05, 2.36, 6.43, 15.30), (3.57, 7.33, 16.40, 35.12),
    ),
    Series(
        2, "2 RTX 4090", "dual-4090", "Llama 3.2 1B", 2, 16, 32, 64,
        "PCIe 4 x16: 26 on paper",
        (8_000, 16_000, 20_000, 32_000), (0.34, 0.58, 0.74, 1.01), (1.38, 2.77, 3.47, 5.45),
    ),
)  # fmt: skip


def steps(ranks: Sequence[int], schemes: Sequence[str]) -> Tables:
    """Proved for the paper's numbers of GPUs, beside the theorem's. NCCL's tree, last, is a chain within
    nodes and a binary tree between them, up and down (NCCL 2.30.7, src/graph/tuning.cc)."""
    cluster, of_model = description.load(MACHINE), "steps: model (NCCL: hops up and down)"
    rows: list[dict[str, Any]] = []
    for size in ranks:
        for scheme in schemes:
            proved = collectives.check(_placed(cluster, scheme, size)[0])
            rows.append({
                "ranks": size,
                "scheme": scheme,
                "depth: here, proved": proved.depth,
                "rounds: here, proved": proved.rounds,
                "steps: paper": f"O(log p), log2 p = {size.bit_length() - 1}",
                of_model: laws.reduction_steps(size, size),
            })  # fmt: skip
        hops = 2 * (_GPUS - 1 + (size // _GPUS).bit_length() - 1)
        rows.append(dict.fromkeys(rows[-1]) | {"ranks": size, "scheme": "NCCL's tree", of_model: hops})
    return {"the paper's numbers of GPUs, one token on each": rows}


def latency(tokens: Sequence[int], ranks: Sequence[int], heads: int, head_dim: int) -> Tables:
    """Whole steps in milliseconds, simulated: the ring of keys and values, that of queries, and our tree;
    and what would have to be added on both sides for the paper's ratio, "close to 8" at its largest."""
    cluster, scheme, said = description.load(MACHINE), "hierarchical", 8
    of_gpus = {}  # what no length changes
    for gpus in ranks:
        (schedule, places), shape = _placed(cluster, scheme, gpus), StepShape(0, heads, heads, head_dim)
        exchange = query_ring_exchange(cluster, places, shape).time
        reduced = reduction_cost(cluster, places, schedule, shape).time
        of_gpus[gpus] = places, exchange, reduced
    rows: list[dict[str, Any]] = []
    for size, gpus in itertools.product(tokens, ranks):
        (places, exchange, reduced), shape = of_gpus[gpus], StepShape(size, heads, heads, head_dim)
        attention, ring = attention_cost(cluster, gpus, shape).time, kv_ring_cost(cluster, places, shape).time
        tree = attention + reduced
        rows.append({
            "tokens": size,
            "GPUs": gpus,
            "attention, ms: simulated": attention / 1000,
            "kv_ring, ms: simulated": ring / 1000,
            "query_ring, ms: simulated": (attention + exchange) / 1000,
            f"{scheme}, ms: simulated": tree / 1000,
            "ring / tree: simulated": ring / tree,
            "ring / tree: paper": "in the figure",  # off which no number was read
        })  # fmt: skip
    rows[-1]["ring / tree: paper"] = f"close to {said}"
    constant = (ring - said * tree) / (said - 1) / 1000  # of the last and largest setting
    what = f"constant on both sides that would make ring / tree {said}, ms: simulated"
    title = f"what {said} would take, {tokens[-1] / 1e6:g}M tokens on {ranks[-1]} GPUs"
    return {f"{MACHINE}, simulated: whole steps": rows, title: [{what: constant}]}


def memory(shard: int, heads: Sequence[int], head_dim: int, gaps: Sequence[float]) -> Tables:
    """Equations 8 and 9, and their gap beside the paper's. shard: tokens of one device. gaps: of each number
    of heads, megabytes."""
    rows: list[dict[str, Any]] = []
    for count, gap in zip(heads, gaps, strict=True):
        peaks = (law(1, shard, count, head_dim) for law in (laws.ring_peak_memory, laws.tree_peak_memory))
        ring, tree = (_CACHE * peak / 1e6 for peak in peaks)
        rows.append({
            "hidden size": count * head_dim,
            "tokens of a device: assumed": shard,
            "ring, MB: eq. 8": ring,
            "tree, MB: eq. 9": tree,
            "gap, MB: paper": gap,
            "gap, MB: model": ring - tree,
            "model / paper - 1": (ring - tree) / gap - 1,
        })  # fmt: skip
    return {"the paper's setting, 2 devices": rows}


def volume(tokens: int, ranks: int, heads: int, head_dim: int) -> Tables:
    """What travels, and whether a ring can hide it: section 6.3's example."""
    cluster, shape, of_rank = (
        description.load(MACHINE),
        StepShape(tokens, heads, heads, head_dim),
        tokens // ranks,
    )
    attending = attention_cost(cluster, ranks, shape).time
    ring = kv_ring_cost(cluster, placement.block(cluster, ranks), shape).time
    attention, hop = attending / 1e6, (ring - attending) / (ranks - 1) / 1e6
    full, least = (laws.ring_volume(1, of_rank, heads, head_dim, hops) for hops in (ranks, ranks - 1))
    tree = float(laws.tree_volume(1, heads, head_dim, ranks))
    setting = f"{tokens} tokens, {ranks} GPUs, hidden size {heads * head_dim}"
    shard = _CACHE * laws.shard_elements(1, of_rank, heads, head_dim)
    return {"the example of section 6.3": [
        {setting: what, "paper": paper, "model": ours}
        for what, paper, ours in (
            ("keys and values of a shard, bytes (eq. 11)", "2btd", shard),
            ("attention of a shard, s: simulated", "O(1e-5)", attention),
            ("one hop to the next GPU, s: simulated", "O(1e-3)", hop),
            ("hop / attention", "about 100 (from the two above)", hop / attention),
            ("ring, p hops: elements that a GPU sends", "2btdp (eq. 10)", full),
            ("ring, p - 1 hops: elements that a GPU sends", None, least),
            ("tree: elements that a GPU sends", "2(p-1)/p (bd + 2bn_h) (eq. 14)", tree),
            ("ring / tree, p - 1 hops", None, least / tree),
        )
    ]}  # fmt: skip


def implied(series: Series) -> tuple[float, float]:
    """(seconds, GB/s each way) that ring minus tree is: a constant, and, from the slope over the tokens, in
    each decoded token and layer p - 1 hops of a shard's keys and values, repeated for every query head."""
    late = [ring - tree for ring, tree in zip(series.ring, series.tree, strict=True)]
    slope, constant = statistics.linear_regression(series.tokens, late)
    per_token = 2 * series.heads * series.head_dim * _CACHE / series.gpus
    return constant, _DECODED * series.layers * (series.gpus - 1) * per_token / slope / 1e9


def llama(series: Sequence[Series]) -> Tables:
    """What ring minus tree implies of a link; and seconds by which the ring is simulated to be later, of nine
    tokens in all layers, with keys and values repeated for every query head, as published. The prefill,
    which is the same in rows of one setting, is left out."""
    links, rows = [], []
    for one in series:
        constant, bandwidth = implied(one)
        links.append({
            "machine": one.machine, "GB/s each way: model, from the paper's times": bandwidth,
            "constant part, s: model": constant, "the link, GB/s": one.link,
        })  # fmt: skip
        cluster = description.load(one.cluster)
        schedule, places = _placed(cluster, "hierarchical", one.gpus)
        for tokens, tree, ring in zip(one.tokens, one.tree, one.ring, strict=True):
            shape = StepShape(tokens, one.heads, one.heads, one.head_dim)
            by_tree = attention_cost(cluster, one.gpus, shape) + reduction_cost(
                cluster, places, schedule, shape
            )
            late = kv_ring_cost(cluster, places, shape).time - by_tree.time
            rows.append({
                "table": one.table, "machine": one.machine, "model": one.model, "tokens": tokens,
                "tree, s: paper": tree, "ring, s: paper": ring, "ring minus tree, s: paper": ring - tree,
                "ring minus tree, s: simulated": _DECODED * one.layers * late / 1e6,
            })  # fmt: skip
    return {
        "ring minus tree as the time of one link": links,
        "what the ring takes longer; simulated with the prefill left out": rows,
    }


def _placed(cluster: Cluster, scheme: str, ranks: int) -> tuple[Schedule, placement.Placement]:
    """A schedule for ranks of which neighbours share nodes, and where they sit."""
    places = placement.block(cluster, ranks)
    nodes = placement.node_groups(cluster, places) if collectives.needs_nodes(scheme) else None
    return collectives.build(scheme, ranks, nodes=nodes), places


_SCHEMES = [
    "k_nomial_tree",
    "recursive_doubling",
    "binary_tree",
    "double_binary_tree",
    "hierarchical",
    "chain",
]
#: In the order of the paper.
EXPERIMENTS = {
    "steps": Experiment(
        "steps of a reduction against log p", "section 5.1, Theorem 1: O(N/p + log p)",
        {"ranks": [8, 64, 128], "schemes": _SCHEMES}, steps,
    ),
    "latency": Experiment(
        "time of a decoding step against context length and GPUs, ring against tree",
        "section 6.1, figure 3",
        {"heads": 16, "head_dim": 128, "tokens": [80_000 << n for n in range(7)], "ranks": [8, 64, 128]},
        latency,
    ),
    "memory": Experiment(
        "peak memory of one attention block on two devices, ring against tree",
        "section 6.2, equations 8 and 9",
        {"shard": 64_000, "heads": [16, 32], "head_dim": 128, "gaps": [524.0, 1040.0]}, memory,
    ),
    "volume": Experiment(
        "communication volume, and whether a ring can hide it behind computation",
        "section 6.3, equations 10 to 14",
        {"tokens": 640_000, "ranks": 8, "heads": 16, "head_dim": 128}, volume,
    ),
    "llama": Experiment(
        "Llama models: prefill and ten tokens, ring against tree", "tables 1 and 2",
        {"series": PUBLISHED}, llama,
    ),
}  # fmt: skip


def shown(value: float | str | None) -> str:
    """A cell as text: whole numbers in full, others to 4 significant digits."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if float(value).is_integer() or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.2e}" if abs(value) < 1e-3 else f"{value:.4g}"
