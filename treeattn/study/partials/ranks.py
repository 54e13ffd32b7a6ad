"""What the parts of all ranks show by themselves, and what each one's q, k and v say of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

import numpy as np

from treeattn import reference
from treeattn.errors import ArgumentError
from treeattn.partial import Array
from treeattn.reference import difference
from treeattn.study.partials.whole import LOG, OTHER, Finding, Part, largest, merged, read_part, tolerance

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


def _counted(rank: int, part: Part, mark: Array, kind: str, text: str, name: str) -> Iterator[Finding]:
    if mark.any():
        first = part.at(int(np.argmax(mark)))
        where = f"{mark.sum()} of {mark.size} heads, first {first}"
        numbers = {"heads": int(mark.sum()), "head": first}
        yield Finding(kind, (rank,), f"rank {rank}: {text.format(name, where)}", numbers)


def _weighty(rank: int, part: Part, weight: Array, base: str) -> Iterator[Finding]:
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


def merged_unlike(given: Sequence[Mapping[str, Array]]) -> Iterator[Finding]:
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
                same = array.shape == held[usual].shape and array.size
                off = float(difference(array, held[usual]).max()) if same else math.nan
                text = f"rank {rank}: {name} is not that of rank {usual}, off by up to {off:.2g}"
                yield Finding("differs", (rank,), text, {"largest difference": off})


def recomputed(
    given: list[dict[str, Array]], parts: list[Part], base: str, scale: float | None
) -> Iterator[Finding]:
    """Parts that are not attention over the rank's own keys and values."""
    for rank, (dump, part) in enumerate(zip(given, parts, strict=True)):
        if {"q", "k", "v"} <= dump.keys():
            right = _attention(rank, dump, scale)
            if right.out.shape != part.out.shape:
                raise ArgumentError(
                    f"rank {rank}: q, k and v give {list(right.out.shape)} numbers of out, the dump has "
                    f"{list(part.out.shape)}"
                )
            values = float(np.abs(dump["v"].astype(np.float64)).max(initial=1.0))
            yield from _compared(rank, part, right, base, tolerance(part.dtype) * values)


def _attention(rank: int, dump: Mapping[str, Array], scale: float | None) -> Part:
    q, k, v = (dump[name] for name in "qkv")
    fit = q.ndim == k.ndim == 4 and k.shape == v.shape and q.shape[::3] == k.shape[::3]
    if not fit or k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ArgumentError(
            f"rank {rank}: q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not fit: [batch, "
            "queries, heads, head_dim] and twice [batch, tokens, kv_heads, head_dim] are needed"
        )
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    out, lse = reference.attention(q, k, v, scale=scale)
    return read_part(f"rank {rank}", {"out": out, "lse": np.swapaxes(lse, 1, 2)}, "e")


def _compared(rank: int, part: Part, right: Part, base: str, allowed: float) -> Iterator[Finding]:
    """`part` is what the rank says, `right` what its tokens say, both natural if `base` is true."""
    extra = part.seen & ~right.seen
    if extra.any():
        text = f"rank {rank}: lse is finite in {extra.sum()} heads that have no key to see"
        yield Finding("not empty", (rank,), text, {"heads": int(extra.sum())})
    both = part.seen & right.seen
    if not both.any():
        return
    mine, true = part.lse[both], right.lse[both]
    close = 1e-3 + 1e-4 * float(np.abs(true).max())
    off, other = float(np.abs(mine - true).max()), OTHER[base]
    head = int(np.argmax(np.where(both, np.abs(part.lse - right.lse), -1)))
    if off > close and np.abs(mine * (LOG[other] / LOG[base]) - true).max() <= close:
        text = (
            f"rank {rank}: lse is in base {other}, not {base}: head {part.at(head)} has "
            f"{part.lse[head] / LOG[base]:.4f}, and its keys give {right.lse[head] / LOG[other]:.4f} in "
            f"base {other}, {right.lse[head] / LOG[base]:.4f} in base {base}"
        )
        yield Finding("wrong base", (rank,), text, {"base": other, "head": part.at(head)})
    elif off > close:
        text = f"rank {rank}: lse is off by up to {off:.3g} from that of its keys: is the scale right?"
        yield Finding("differs", (rank,), text, {"largest difference of lse": off})
    off = float(np.abs(part.out - right.out)[both].max())
    if off > allowed:
        text = f"rank {rank}: out is off by up to {off:.3g} from attention over its own keys and values"
        yield Finding("differs", (rank,), text, {"largest difference of out": off})


def keys_held_twice(given: list[dict[str, Array]]) -> Iterator[Finding]:
    """Tokens with the same keys on two ranks; keys of zeros are room that is not used."""
    owners: dict[bytes, int] = {}
    for rank, dump in enumerate(given):
        if "k" not in dump or dump["k"].ndim != 4:
            continue
        tokens = [token.tobytes() for token in np.swapaxes(dump["k"], 0, 1) if token.any()]
        held = [owners.setdefault(token, rank) for token in tokens]
        for owner in sorted({*held} - {rank}):
            count = held.count(owner)
            text = (
                f"{count} of the {len(tokens)} tokens of rank {rank} are on rank {owner} too, by their keys"
            )
            yield Finding("counted twice", (owner, rank), text, {"tokens": count})
