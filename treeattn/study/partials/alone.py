"""What the parts of all ranks show by themselves."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from treeattn.study.partials.dump import LOG, Finding, Part, largest, tolerance
from treeattn.study.partials.whole import merged

_HARMLESS = 1e-6  # a weight that no result shows


def unlike(parts: list[Part]) -> Iterator[Finding]:
    """Ranks whose shape or type is not that of most."""
    kinds = [f"{part.dtype} {[*part.shape, part.out.shape[-1]]}" for part in parts]
    usual = max(kinds, key=kinds.count)
    for rank, kind in enumerate(kinds):
        if kind != usual:
            yield Finding("differs", (rank,), f"rank {rank} holds out {kind}, most ranks {usual}")


def unwell(parts: list[Part], base: str) -> Iterator[Finding]:
    """Heads that saw nothing and are not marked so, and NaN."""
    total = merged(parts).lse
    for rank, part in enumerate(parts):
        with np.errstate(invalid="ignore", over="ignore"):
            weight = np.where(part.seen, np.exp(part.lse - total), 0.0)
        yield from _weighty(rank, part, weight, base)
        for name, mark in (("+inf", part.lse == np.inf), ("NaN", np.isnan(part.lse))):
            text = "lse is {} in {}: -inf is what says that nothing was seen, in a merge of any kind"
            yield from _counted(rank, part, mark, "not empty", text, name)
        broken = part.seen & np.isnan(part.out).any(axis=-1)
        yield from _counted(rank, part, broken, "not a number", "out is {} beside a finite lse in {}", "NaN")


def _counted(rank: int, part: Part, mark: Any, kind: str, text: str, name: str) -> Iterator[Finding]:
    if mark.any():
        first = part.at(int(np.argmax(mark)))
        where = f"{mark.sum()} of {mark.size} heads, first {first}"
        numbers = {"heads": int(mark.sum()), "head": first}
        yield Finding(kind, (rank,), f"rank {rank}: {text.format(name, where)}", numbers)


def _weighty(rank: int, part: Part, weight: Any, base: str) -> Iterator[Finding]:
    """An out of nothing but zeros is what a kernel leaves that saw nothing."""
    zero = part.seen & (part.out == 0).all(axis=-1)
    if not zero.any():
        return
    head = int(np.argmax(np.where(zero, weight, -1)))
    share = float(weight[head])
    text = (
        f"rank {rank}: out is 0 and lse finite in {zero.sum()} of {zero.size} heads: if these saw nothing, "
        f"lse must be -inf; head {part.at(head)} has {part.lse[head] / LOG[base]:.4g}, which takes "
        f"{share:.2g} of the weight"
    )
    numbers = {"heads": int(zero.sum()), "head": part.at(head), "weight": share}
    yield Finding("not empty", (rank,), text, numbers, fault=share > _HARMLESS)


def alike(parts: list[Part]) -> Iterator[Finding]:
    """Two ranks with the same results saw the same tokens."""
    allowed = tolerance(parts[0].dtype) * largest(parts)
    for (first, one), (second, other) in combinations(enumerate(parts), 2):
        both = one.seen & other.seen
        if not both.any() or (one.seen != other.seen).any():
            continue
        apart = float(np.abs(one.out - other.out)[both].max())
        if apart <= allowed and float(np.abs(one.lse - other.lse)[both].max()) <= 1e-4:
            text = (
                f"ranks {first} and {second} hold the same part, to {apart:.1e} in all {both.sum()} heads: "
                "one shard is counted twice"
            )
            yield Finding("counted twice", (first, second), text, {"largest difference of out": apart})


def merged_unlike(given: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """After the merge every rank must hold the same bits."""
    for name in ("merged_out", "merged_lse"):
        held = {rank: np.ascontiguousarray(part[name]) for rank, part in enumerate(given) if name in part}
        if not held:
            continue
        lacking = tuple(rank for rank in range(len(given)) if rank not in held)
        if lacking:
            text = f"{name} is not in the dumps of ranks {', '.join(map(str, lacking))}: not compared there"
            yield Finding("not compared", lacking, text, {}, fault=False)
        bits = {rank: array.tobytes() for rank, array in held.items()}
        count = Counter(bits.values())
        usual = max(bits, key=lambda rank: count[bits[rank]])
        for rank, array in held.items():
            if bits[rank] != bits[usual]:
                off = _apart(array, held[usual])
                text = f"rank {rank}: {name} is not that of rank {usual}, off by up to {off:.2g}"
                yield Finding("differs", (rank,), text, {"largest difference": off})


def _apart(one: Any, other: Any) -> float:
    if one.shape != other.shape or not one.size:
        return math.nan
    with np.errstate(invalid="ignore"):
        return float(np.nan_to_num(np.abs(one.astype(np.float64) - other.astype(np.float64))).max())
