"""What travels: equations 10 to 14, and the example of section 6.3."""

from __future__ import annotations

from collections.abc import Sequence

from treeattn.collectives.clusters import description
from treeattn.collectives.clusters.placement import block
from treeattn.collectives.clusters.simulate import simulate
from treeattn.collectives.traffic import Payload
from treeattn.study import laws
from treeattn.study.compare.rows import Key
from treeattn.study.decode_step import Shape, attention_cost, kv_ring_cost
from treeattn.study.paper import experiment
from treeattn.study.paper.experiment import MACHINE, Cell, Experiment, Points, Table

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


def law(scheme: str, ranks: int, tokens: int, heads: int, head_dim: int) -> float:
    """Elements that a rank sends by the equation that the scheme is held against. tokens: over all ranks."""
    if SCHEMES[scheme] == "14":
        return float(laws.tree_volume(1, heads, head_dim, ranks))
    hops = ranks if SCHEMES[scheme] == "10" else ranks - 1
    return laws.ring_volume(1, tokens, heads, head_dim, hops) / ranks


def model(tokens: int, ranks: int, heads: int, head_dim: int) -> list[Table]:
    """Section 6.3's example, and the elements that a GPU sends, as counted on simulated links."""
    cluster, shape = description.load(MACHINE), Shape(tokens, heads, heads, head_dim)
    of_rank, payload = tokens // ranks, Payload(heads, 4 * (head_dim + 2))
    shard = laws.shard_elements(1, of_rank, heads, head_dim) * CACHE
    attending, ring = (
        attention_cost(cluster, ranks, shape).time,
        kv_ring_cost(cluster, block(cluster, ranks), shape).time,
    )
    attention, hop = attending / 1e6, (ring - attending) / (ranks - 1) / 1e6
    full, least = (laws.ring_volume(1, of_rank, heads, head_dim, hops) for hops in (ranks, ranks - 1))
    tree = float(laws.tree_volume(1, heads, head_dim, ranks))
    rows: list[tuple[Cell, ...]] = [
        ("keys and values of a shard, bytes (eq. 11)", None, "2btd", shard),
        ("attention of a shard, s: simulated", None, "O(1e-5)", attention),
        ("one hop to the next GPU, s: simulated", None, "O(1e-3)", hop),
        ("hop / attention", None, "about 100 (from the two above)", hop / attention),
        ("ring, p hops: elements that a GPU sends", None, "2btdp (eq. 10)", full),
        ("ring, p - 1 hops: elements that a GPU sends", None, None, least),
        ("tree: elements that a GPU sends", None, "2(p-1)/p (bd + 2bn_h) (eq. 14)", tree),
        ("ring / tree, p - 1 hops", None, None, least / tree),
    ]
    counted: list[tuple[Cell, ...]] = []
    for scheme in ("ring", "reduce_scatter_gather", "recursive_doubling", "binary_tree", "hierarchical"):
        schedule, places = experiment.placed(cluster, scheme, ranks)
        sent = sum(tier.bytes for tier in simulate(schedule, cluster, places, payload).traffic)
        counted.append((scheme, sent / ranks / 4))
    hidden = f"hidden size {heads * head_dim}"
    setting = f"{tokens} tokens, {ranks} GPUs, {hidden}"
    title = f"{MACHINE}, simulated: {ranks} GPUs, {hidden}; {tokens} tokens or any number"
    return [
        Table("the example of section 6.3", (setting, "here", "paper", "model"), rows),
        Table(title, ("scheme", "elements a GPU sends, mean: simulated"), counted),
    ]


def keys(ranks: Sequence[int], tokens: int, heads: int, head_dim: int) -> list[Key]:
    """One step of every scheme of `SCHEMES`. tokens: over all ranks."""
    shape = tokens, heads, head_dim
    return [experiment.decode_key(scheme, size, *shape) for size in ranks for scheme in SCHEMES]


def tables(points: dict[Key, Points]) -> list[Table]:
    """Payload as it is handed to MPI, beside the law's."""
    rows: list[tuple[Cell, ...]] = []
    for key, blocks in points.items():
        size = CACHE if key.scheme.startswith("kv_ring") else RECORD
        of_tiers = [blocks[0].get(f"bytes_{tier}") for tier in ("intra", "inter", "library")]
        sent = [number for number in of_tiers if number is not None]  # none where only the library knows
        here = sum(sent) / key.ranks / size if sent else None
        expected = law(key.scheme, key.ranks, key.tokens, key.heads, key.head_dim)
        share = None if here is None else here / expected
        rows.append((key.ranks, key.scheme, SCHEMES[key.scheme], here, expected, share))
    headings = (
        "ranks", "scheme", "equation", "elements a rank sends, mean: here", "elements: model",
        "here / model",
    )  # fmt: skip
    title = f"run here, {key.tokens} tokens, hidden size {key.heads * key.head_dim}"
    return [Table(title, headings, rows)]


EXPERIMENT = Experiment(
    title="communication volume, and whether a ring can hide it behind computation",
    where="section 6.3, equations 10 to 14",
    model=model,
    measure=experiment.sweep(keys, tables),
    paper={"tokens": 640_000, "ranks": 8, "heads": 16, "head_dim": 128},
    small={"tokens": 4_000, "ranks": (2, 4), "heads": 16, "head_dim": 128, "effort": experiment.COUNTED},
)
