"""The paper's settings on simulated clusters: the shipped descriptions of its machines, schedules message by
message. Every time and rate that the experiments predict is from here.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from treeattn import collectives
from treeattn.collectives import Schedule, Transfer
from treeattn.collectives.clusters import description
from treeattn.collectives.clusters.description import Cluster
from treeattn.collectives.clusters.placement import Placement, block, node_groups
from treeattn.collectives.clusters.simulate import simulate
from treeattn.collectives.traffic import Payload
from treeattn.study.decode_step import Shape, attention_time, decode_step, kv_ring_time
from treeattn.study.paper.experiment import IN_THE_FIGURE, Cell, Table

if TYPE_CHECKING:
    from treeattn.study.paper.llama import Series

MACHINE = "dgx-h100"
#: The paper's name of a machine -> its description.
MACHINES = {"8 H100": MACHINE, "4 MI300X": "mi300x", "2 RTX 4090": "dual-4090"}
TREE = "hierarchical"
PEAK_SHARE = 0.4  # of a GPU's arithmetic that a prefill reaches: assumed
#: Ring / tree in the paper's largest setting, 5.12M tokens on 128 GPUs: "close to 8" in section 6.1.
RATIO = 8.0
DECODED = 9  # of ten tokens the first comes from the prefill


def steps(ranks: Sequence[int], schemes: Sequence[str]) -> list[Table]:
    """Microseconds of a reduction of 16 x 128, beside the floor."""
    cluster = description.load(MACHINE)
    rows: list[tuple[Cell, ...]] = []
    for size, scheme in itertools.product(ranks, schemes):
        schedule, places = _placed(cluster, scheme, size)
        found = simulate(schedule, cluster, places)
        rows.append((size, scheme, found.time, found.bound))
    headings = ("ranks", "scheme", "µs: simulated", "no scheme is faster than, µs: simulated")
    return [Table(f"{MACHINE}, simulated: the reduction alone, 16 x 128", headings, rows)]


def bandwidth(sizes: Sequence[int]) -> list[Table]:
    """GB/s of one message."""
    cluster = description.load(MACHINE)
    send = Schedule("send", 2, 1, ((Transfer(0, 1, range(1), False),),))
    rows: list[tuple[Cell, ...]] = []
    for size in sizes:
        one = Payload(1, size)
        within, between = (
            size / (1e3 * (found.time - found.prices.call - found.prices.round))
            for found in (simulate(send, cluster, (0, far), one) for far in (1, cluster.slots))
        )
        rows.append((size, within, between, within / between, IN_THE_FIGURE))
    tiers = "within a node, GB/s: simulated", "between nodes, GB/s: simulated"
    headings = ("bytes", *tiers, "ratio: simulated", "paper")
    return [Table(f"{MACHINE}, simulated: one message, without the call", headings, rows)]


def latency(tokens: Sequence[int], ranks: Sequence[int], heads: int, head_dim: int) -> list[Table]:
    """Whole steps in milliseconds: the ring of keys and values, that of queries, and our tree; and what would
    have to be added to ring and tree for the paper's ratio."""
    cluster = description.load(MACHINE)
    rows: list[tuple[Cell, ...]] = []
    for size, gpus in itertools.product(tokens, ranks):
        schedule, places = _placed(cluster, TREE, gpus)
        step = decode_step(cluster, places, schedule, Shape(size, heads, heads, head_dim))
        times = (value / 1000 for value in (step.attention, step.kv_ring, step.query_ring, step.time))
        largest = (size, gpus) == (max(tokens), max(ranks))
        says = f"close to {RATIO:g}" if largest else IN_THE_FIGURE
        rows.append((size, gpus, *times, step.kv_ring / step.time, says))
        if largest:
            constant = (step.kv_ring - RATIO * step.time) / (RATIO - 1) / 1000
    headings = (
        "tokens", "GPUs", "attention, ms: simulated", "kv_ring, ms: simulated", "query_ring, ms: simulated",
        f"{TREE}, ms: simulated", "ring / tree: simulated", "ring / tree: paper",
    )  # fmt: skip
    what = f"constant on both sides that would make ring / tree {RATIO:g}, ms: simulated"
    title = f"what {RATIO:g} would take, {max(tokens) / 1e6:g}M tokens on {max(ranks)} GPUs"
    return [
        Table(f"{MACHINE}, simulated: whole steps", headings, rows),
        Table(title, (what,), [(constant,)]),
    ]


def attention_and_hop(tokens: int, ranks: int, heads: int, head_dim: int) -> tuple[float, float]:
    """Seconds of a rank's attention, and of a hop of its keys and values to the next rank."""
    cluster = description.load(MACHINE)
    shape = Shape(tokens, heads, heads, head_dim)
    attention = attention_time(cluster, ranks, shape)
    ring = kv_ring_time(cluster, block(cluster, ranks), shape)
    return attention / 1e6, (ring - attention) / (ranks - 1) / 1e6


def volume(tokens: int, ranks: int, heads: int, head_dim: int) -> list[Table]:
    """Elements that a GPU sends, as counted on the simulated links."""
    cluster = description.load(MACHINE)
    payload = Payload(heads, 4 * (head_dim + 2))
    rows: list[tuple[Cell, ...]] = []
    for scheme in ("ring", "reduce_scatter_gather", "recursive_doubling", "binary_tree", TREE):
        schedule, places = _placed(cluster, scheme, ranks)
        sent = sum(tier.bytes for tier in simulate(schedule, cluster, places, payload).traffic)
        rows.append((scheme, sent / ranks / 4))
    headings = ("scheme", "elements a GPU sends, mean: simulated")
    title = (
        f"{MACHINE}, simulated: {ranks} GPUs, hidden size {heads * head_dim}; {tokens} tokens or any number"
    )
    return [Table(title, headings, rows)]


def llama(series: Sequence[Series]) -> list[Table]:
    """Seconds by which the ring is later than the tree, of nine tokens in all layers, the ring with keys and
    values repeated for every query head, as published; and prefill and decode apart."""
    late: list[tuple[Cell, ...]] = []
    apart: list[tuple[Cell, ...]] = []
    for one in series:
        cluster = description.load(MACHINES[one.machine])
        schedule, places = _placed(cluster, TREE, one.gpus)
        assert cluster.memory is not None
        weights = DECODED * 2 * one.parameters / (1e9 * cluster.memory)  # every GPU reads all of them
        for tokens, tree, ring in zip(one.tokens, one.tree, one.ring, strict=True):
            step = decode_step(cluster, places, schedule, Shape(tokens, one.heads, one.heads, one.head_dim))
            by_tree, by_ring = (DECODED * one.layers * each / 1e6 for each in (step.time, step.kv_ring))
            late.append((one.machine, one.model, tokens, ring - tree, by_ring - by_tree))
            first = _prefill(one, tokens)
            decoded = (weights + by_tree, weights + by_ring)
            apart.append(
                (one.machine, tokens, first, *decoded, *(first + each for each in decoded), tree, ring)
            )
    headings = ("machine", "model", "tokens", "ring minus tree, s: paper", "ring minus tree, s: simulated")
    columns = (
        "machine", "tokens", "prefill, s: model", "nine tokens by tree, s: simulated",
        "nine tokens by ring, s: simulated", "all by tree, s", "all by ring, s", "all by tree, s: paper",
        "all by ring, s: paper",
    )  # fmt: skip
    return [
        Table("simulated: what the ring takes longer, prefill left out", headings, late),
        Table("simulated: prefill and decode apart", columns, apart),
    ]


def _prefill(one: Series, tokens: int) -> float:
    """Seconds of the arithmetic alone: every weight and every pair of tokens, dealt out evenly."""
    linear = 2 * one.parameters * tokens
    attention = 2 * one.layers * one.heads * one.head_dim * tokens**2  # QK and PV, half of the pairs
    return (linear + attention) / (one.gpus * PEAK_SHARE * one.peak)


def _placed(cluster: Cluster, scheme: str, ranks: int) -> tuple[Schedule, Placement]:
    """Neighbouring ranks share nodes."""
    places = block(cluster, ranks)
    nodes = node_groups(cluster, places) if collectives.needs_nodes(scheme) else None
    return collectives.build(scheme, ranks, nodes=nodes), places
