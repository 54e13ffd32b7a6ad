"""What the q, k and v of a dump say of its part."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from treeattn import reference
from treeattn.errors import ArgumentError
from treeattn.study.partials.dump import LOG, OTHER, Finding, Part, read_part, tolerance


def recomputed(
    given: list[dict[str, Any]], parts: list[Part], base: str, scale: float | None
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


def _attention(rank: int, dump: Mapping[str, Any], scale: float | None) -> Part:
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


def keys_held_twice(given: list[dict[str, Any]]) -> Iterator[Finding]:
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
