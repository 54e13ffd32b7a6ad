"""Peak memory of one attention block on two devices: equations 8 and 9, and which buffer is which term."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Sequence
from typing import Any

from treeattn.collectives.runtime.communicator import MpiCommunicator
from treeattn.study import laws
from treeattn.study.compare import problems, steps
from treeattn.study.compare.rows import Key
from treeattn.study.paper import experiment
from treeattn.study.paper.experiment import Cell, Experiment, Table

CACHE, RECORD = 2, 4  # bytes of an element: bfloat16 keys, values and query; float32 records and results
MB = 1e6
RING, TREE = "kv_ring", "binary_tree"

#: Hidden size -> the gap between ring and tree in section 6.2, MB.
GAPS = {2048: 524.0, 4096: 1040.0}


def law(scheme: str, shard: int, heads: int, head_dim: int) -> int:
    """Bytes that equation 8 (ring) or 9 (tree) gives for 16-bit elements. shard: tokens of one device."""
    peak = laws.ring_peak_memory if scheme == RING else laws.tree_peak_memory
    return peak(1, shard, heads, head_dim) * CACHE


def buffers(scheme: str, ranks: int, shard: int, heads: int, head_dim: int) -> list[tuple[str, str, int]]:
    """(term of equation 8 or 9, what it is, bytes) of each array of the rank that holds most: what a
    measurement must find, but for Python's own objects."""
    keys_and_values = laws.shard_elements(1, shard, heads, head_dim) * CACHE
    hidden, records = heads * head_dim, heads * (head_dim + 2) * RECORD
    neighbours = min(2, ranks - 1)
    ring = [
        ("2btd", f"arriving keys and values, {neighbours} buffers", neighbours * keys_and_values),
        ("bd", "result, float32", hidden * RECORD),
        ("none", f"{ranks} partials, float32", ranks * records),
    ]
    tree = [
        ("bd + 2bn_h", "partial: numerator, denominator, maximum, float32", records),
        ("none", f"arriving partials, {neighbours} buffers", neighbours * records),
        ("none", "result, float32", hidden * RECORD),
    ]
    return [
        ("2btd", "own keys and values (the caller's)", keys_and_values),
        ("bd", "query (the caller's)", hidden * CACHE),
        *(ring if scheme == RING else tree),
        ("none", "log-sum-exp, float32", heads * RECORD),
    ]


def model(shard: int, heads: Sequence[int], head_dim: int) -> list[Table]:
    """Equations 8 and 9, and their gap beside the paper's."""
    headings = (
        "hidden size", "tokens of a device: assumed", "ring, MB: eq. 8", "tree, MB: eq. 9",
        "gap, MB: here", "gap, MB: paper", "gap, MB: model", "model / paper - 1",
    )  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    for count in heads:
        ring, tree = (law(scheme, shard, count, head_dim) / MB for scheme in (RING, TREE))
        hidden, gap = count * head_dim, ring - tree
        rows.append((hidden, shard, ring, tree, None, GAPS[hidden], gap, gap / GAPS[hidden] - 1))
    return [Table("the paper's setting, 2 devices", headings, rows)]


def keys(ranks: Sequence[int], shard: int, heads: Sequence[int], head_dim: int) -> list[Key]:
    """Ring and tree in turn, with `shard` tokens on every rank."""
    cases = itertools.product(ranks, heads, (RING, TREE))
    return [experiment.decode_key(scheme, p, p * shard, count, head_dim) for p, count, scheme in cases]


def allocated(comm: MpiCommunicator, key: Key) -> tuple[int, int]:
    """Bytes that a plan holds after its first step, and that a second step adds at its peak, on the rank
    where they are most, as tracemalloc sees them: not the buffers of the MPI library. Collective."""
    problem = problems.decode_problem(comm, key)
    given: Any = problem.q, problem.k, problem.v
    tracemalloc.start()
    try:
        step = steps.plan(comm, key, {})
        for _ in range(2):
            tracemalloc.reset_peak()
            held = tracemalloc.get_traced_memory()[0]
            step.local(*given)
            step.reduce()
            step.finish()
        peak = tracemalloc.get_traced_memory()[1]
        step.close()
    finally:
        tracemalloc.stop()
    everyone = comm.allgather((held, max(peak - held, 0)))
    return max(h for h, _ in everyone), max(p for _, p in everyone)


def measure(
    comm: MpiCommunicator, ranks: Sequence[int], shard: int, heads: Sequence[int], head_dim: int
) -> list[Table]:
    """What tracemalloc saw, beside the equations and our buffers; ring minus tree; which buffer is which.

    Collective. Schemes do as `decode` does: a plan, and two steps of it.
    """
    found: dict[Key, tuple[int, int]] = {}
    for key in keys([size for size in ranks if size <= comm.size], shard, heads, head_dim):
        with experiment.first_ranks(comm, key.ranks) as part:
            if part is not None:
                found[key] = allocated(part, key)
    if comm.rank or not found:
        return []
    headings = (
        "ranks", "hidden size", "scheme", "q, k, v, MB", "plan and step hold, MB: here",
        "a step adds, MB: here", "together, MB: here", "eq. 8, 9, MB: model", "our buffers, MB: counted",
        "rest, kB",
    )  # fmt: skip
    rows = [_row(key, *sizes) for key, sizes in found.items()]
    gaps = [
        (*ring[:2], ring[6] - tree[6], ring[7] - tree[7], (ring[6] - tree[6]) / (ring[7] - tree[7]))
        for ring, tree in zip(rows[::2], rows[1::2], strict=True)
    ]
    hidden = heads[0] * head_dim
    terms = [
        (scheme, term, what, size / 1e3)
        for scheme in (RING, TREE)
        for term, what, size in buffers(scheme, 2, shard, heads[0], head_dim)
    ]
    of_gaps = ("ranks", "hidden size", "gap, MB: here", "gap, MB: model", "here / model")
    of_terms = ("scheme", "term of eq. 8, 9", "buffer of ours", "kB: counted")
    return [
        Table(f"run here, {shard} tokens on a rank, bfloat16, worst rank", headings, rows),
        Table("ring minus tree, run here", of_gaps, gaps),
        Table(f"which buffer is which term, 2 ranks, hidden size {hidden}", of_terms, terms),
    ]


def _row(key: Key, held: int, step_peak: int) -> tuple[Any, ...]:
    shape = key.tokens // key.ranks, key.heads, key.head_dim
    ours = buffers(key.scheme, key.ranks, *shape)
    arguments = sum(size for _, what, size in ours if "caller's" in what)
    counted = sum(size for *_, size in ours)
    total = arguments + held + step_peak
    sizes = (arguments, held, step_peak, total, law(key.scheme, *shape), counted)
    hidden = key.heads * key.head_dim
    return key.ranks, hidden, key.scheme, *(size / MB for size in sizes), (total - counted) / 1e3


EXPERIMENT = Experiment(
    title="peak memory of one attention block on two devices, ring against tree",
    where="section 6.2, equations 8 and 9",
    model=model,
    measure=measure,
    paper={"shard": 64_000, "heads": (16, 32), "head_dim": 128},
    small={"shard": 4_096, "ranks": (2, 4), "heads": (16, 32), "head_dim": 128},
)
