"""Peak memory of one attention block on two devices: equations 8 and 9."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Sequence
from typing import Any

from treeattn.mpi.communicators import MpiCommunicator
from treeattn.study import laws
from treeattn.study.compare import problems, steps
from treeattn.study.compare.rows import Key
from treeattn.study.paper.experiment import Table, decode_key, first_ranks

TITLE = "peak memory of one attention block on two devices, ring against tree"
WHERE = "section 6.2, equations 8 and 9"
PAPER = {"shard": 64_000, "heads": [16, 32], "head_dim": 128}
SMALL = {"shard": 4_096, "ranks": [2, 4], "heads": [16, 32], "head_dim": 128}
CACHE = 2  # bytes of an element of keys, values and query
MB = 1e6
RING, TREE = "kv_ring", "binary_tree"
_TOGETHER, _BY_LAW = "together, MB: here", "eq. 8, 9, MB: model"

#: Hidden size -> the gap between ring and tree in section 6.2, MB.
GAPS = {2048: 524.0, 4096: 1040.0}


def law(scheme: str, shard: int, heads: int, head_dim: int) -> int:
    """Bytes that equation 8 (ring) or 9 (tree) gives for 16-bit elements. shard: tokens of one device."""
    peak = laws.ring_peak_memory if scheme == RING else laws.tree_peak_memory
    return peak(1, shard, heads, head_dim) * CACHE


def model(shard: int, heads: Sequence[int], head_dim: int) -> list[Table]:
    """Equations 8 and 9, and their gap beside the paper's."""
    rows: list[dict[str, Any]] = []
    for count in heads:
        ring, tree = (law(scheme, shard, count, head_dim) / MB for scheme in (RING, TREE))
        gap = GAPS[count * head_dim]
        rows.append({
            "hidden size": count * head_dim,
            "tokens of a device: assumed": shard,
            "ring, MB: eq. 8": ring,
            "tree, MB: eq. 9": tree,
            "gap, MB: here": None,
            "gap, MB: paper": gap,
            "gap, MB: model": ring - tree,
            "model / paper - 1": (ring - tree) / gap - 1,
        })  # fmt: skip
    return [Table("the paper's setting, 2 devices", rows)]


def measure(
    comm: MpiCommunicator, ranks: Sequence[int], shard: int, heads: Sequence[int], head_dim: int
) -> list[Table]:
    """What tracemalloc saw of ring and tree in turn, with `shard` tokens on every rank, beside the equations;
    and ring minus tree. Collective. Schemes do as `decode` does: a plan, and two steps of it.
    """
    rows: list[dict[str, Any]] = []
    for size, count, scheme in itertools.product(ranks, heads, (RING, TREE)):
        if size <= comm.size:
            with first_ranks(comm, size) as part:
                if part is not None:
                    rows.append(_row(part, decode_key(scheme, size, size * shard, count, head_dim)))
    if comm.rank or not rows:
        return []
    gaps: list[dict[str, Any]] = []
    for ring, tree in zip(rows[::2], rows[1::2], strict=True):
        here, by_law = (ring[name] - tree[name] for name in (_TOGETHER, _BY_LAW))
        gaps.append({
            "ranks": ring["ranks"], "hidden size": ring["hidden size"], "gap, MB: here": here,
            "gap, MB: model": by_law, "here / model": here / by_law,
        })  # fmt: skip
    return [
        Table(f"run here, {shard} tokens on a rank, bfloat16, worst rank", rows),
        Table("ring minus tree, run here", gaps),
    ]


def _row(comm: MpiCommunicator, key: Key) -> dict[str, Any]:
    """A row of one scheme, of the rank where it is most. Collective."""
    held, step_peak = allocated(comm, key)
    shape = key.tokens // key.ranks, key.heads, key.head_dim
    arguments = (laws.shard_elements(1, *shape) + key.heads * key.head_dim) * CACHE
    return {
        "ranks": key.ranks,
        "hidden size": key.heads * key.head_dim,
        "scheme": key.scheme,
        "q, k, v, MB": arguments / MB,
        "plan and step hold, MB: here": held / MB,
        "a step adds, MB: here": step_peak / MB,
        _TOGETHER: (arguments + held + step_peak) / MB,
        _BY_LAW: law(key.scheme, *shape) / MB,
    }


def allocated(comm: MpiCommunicator, key: Key) -> tuple[int, int]:
    """Bytes that a plan holds after its first step, and that a second step adds at its peak, on the rank
    where they are most, as tracemalloc sees them: not the buffers of the MPI library. Collective."""
    inputs = problems.decode_inputs(comm, key)
    given: Any = inputs.q, inputs.k, inputs.v
    with steps.plan(comm, key, {}) as step:
        step(*given)  # loads what the first one does
    tracemalloc.start()
    try:
        step = steps.plan(comm, key, {})
        for _ in range(2):
            tracemalloc.reset_peak()
            held = tracemalloc.get_traced_memory()[0]
            step(*given)
        peak = tracemalloc.get_traced_memory()[1]
        step.close()
    finally:
        tracemalloc.stop()
    everyone = comm.allgather((held, max(peak - held, 0)))
    return max(h for h, _ in everyone), max(p for _, p in everyone)
