"""Which merge of the parts reproduces the whole: what was done is found by doing it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from treeattn.errors import ArgumentError
from treeattn.partial import Array
from treeattn.reference import difference
from treeattn.study.partials.dump import (
    LOG,
    OTHER,
    Finding,
    Part,
    check_type,
    largest,
    paired,
    tolerance,
)


class Whole(NamedTuple):
    """A merged result: out [heads, head_dim], natural lse [heads] or None where nothing is said of it."""

    out: Array
    lse: Array | None


class Hypothesis(NamedTuple):
    """What may have been done, and what would come of it."""

    kind: str
    ranks: tuple[int, ...]
    what: str
    whole: Whole


def merged(parts: Sequence[Part], times: Mapping[int, float] | None = None) -> Whole:
    """Parts merged in float64; rank r counts times[r] times, by default once."""
    lse = np.stack([np.where(part.seen, part.lse, -np.inf) for part in parts])
    out = np.stack([np.where(part.seen[:, None], part.out, 0.0) for part in parts])
    high = lse.max(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        weight = np.where(np.isfinite(lse), np.exp(lse - high), 0.0)
        for rank, count in (times or {}).items():
            weight[rank] *= count
        total = weight.sum(axis=0)
        mean = (weight[..., None] * out).sum(axis=0) / total[:, None]
        return Whole(
            np.where(total[:, None] == 0, 0.0, mean), np.where(total == 0, -np.inf, high + np.log(total))
        )


def explained(parts: list[Part], given: Mapping[str, Array], base: str) -> Iterator[Finding]:
    """Nothing where the right merge reproduces the whole; else which wrong one does."""
    found, allowed = _read(parts, given, base)
    right = merged(parts)
    if _off(right, found, allowed) <= 1:
        return
    tried = sorted(
        (_off(wrong.whole, found, allowed), n, wrong) for n, wrong in enumerate(_mistakes(parts, base))
    )
    fits = [wrong for off, _, wrong in tried if off <= 1]
    head, element, where = _where(parts[0], right, found, allowed, base)
    best = fits[0] if fits else tried[0][2]
    numbers = {"head": parts[0].at(head), "off by": float(difference(right.out, found.out)[head, element])}
    if not fits:
        text = f"no single mistake makes the whole of these parts, {best.what} comes nearest; {where}"
        yield Finding("unexplained", (), text, numbers)
        return
    off = float(difference(best.whole.out, found.out).max())
    also = "".join(f", as does {wrong.what}" for wrong in fits[1:3])
    that = best.whole.out[head, element]
    text = f"{best.what} makes the whole, to {off:.1e}{also}; {where}, {that:.5g} that way"
    yield Finding(best.kind, best.ranks, text, {**numbers, "reproduced to": off})


def _read(parts: list[Part], given: Mapping[str, Array], base: str) -> tuple[Whole, tuple[float, float]]:
    """The whole, and what its out and lse may be off by."""
    if "out" not in given or given["out"].size != parts[0].out.size:
        raise ArgumentError(f"the whole needs an out of {parts[0].out.size} elements, as each part has")
    check_type("the whole", "out", given["out"])
    out = given["out"].astype(np.float64).reshape(*parts[0].shape, parts[0].out.shape[-1])
    lse, allowed = None, 0.0
    if "lse" in given:
        lse = paired("the whole", {"out": out, "lse": given["lse"]})[1].astype(np.float64).ravel() * LOG[base]
        allowed = 1e-3 + 1e-4 * float(np.abs(lse[np.isfinite(lse)]).max(initial=0.0))
    types = {part.dtype for part in parts} | {given["out"].dtype.name}
    return Whole(out.reshape(parts[0].out.shape), lse), (tolerance(*types) * largest(parts), allowed)


def _mistakes(parts: list[Part], base: str) -> Iterator[Hypothesis]:
    """lse of a mistaken base stays in that base: it is compared in units of the base that was meant."""
    every, other = tuple(range(len(parts))), OTHER[base]
    ratio = LOG[other] / LOG[base]
    scaled = [part._replace(lse=part.lse * ratio) for part in parts]
    out, lse = merged(scaled)
    assert lse is not None
    yield Hypothesis("wrong base", every, f"reading every lse in base {other}", Whole(out, lse / ratio))
    right, right_lse = merged(parts)
    assert right_lse is not None
    yield Hypothesis("wrong base", (), f"writing the lse of the whole in base {other}",
                     Whole(right, right_lse / ratio))  # fmt: skip
    blind = tuple(rank for rank in every if not parts[rank].seen.all())
    if blind:
        zeros = [_taken_for_zero(part) for part in parts]
        yield Hypothesis("not empty", blind, "counting what saw nothing with lse 0 and out 0", merged(zeros))
    for rank in every:
        mixed = [*parts[:rank], scaled[rank], *parts[rank + 1 :]]
        yield Hypothesis("wrong base", (rank,), f"reading lse of rank {rank} in base {other}", merged(mixed))
        yield Hypothesis("counted twice", (rank,), f"counting rank {rank} twice", merged(parts, {rank: 2.0}))
        yield Hypothesis("left out", (rank,), f"leaving rank {rank} out", merged(parts, {rank: 0.0}))
    even = merged([part._replace(lse=np.zeros_like(part.lse)) for part in parts])
    yield Hypothesis("unexplained", every, "averaging without weights", even._replace(lse=None))


def _taken_for_zero(part: Part) -> Part:
    return part._replace(
        lse=np.where(part.seen, part.lse, 0.0),
        out=np.where(part.seen[:, None], part.out, 0.0),
        seen=np.ones_like(part.seen),
    )


def _off(result: Whole, found: Whole, allowed: tuple[float, float]) -> float:
    """How far a merge is from the whole, in units of what is allowed."""
    pairs = [(result.out, found.out, allowed[0])]
    if result.lse is not None and found.lse is not None:
        pairs.append((result.lse, found.lse, allowed[1]))
    return max(float(difference(mine, wanted).max(initial=0.0)) / unit for mine, wanted, unit in pairs)


def _where(
    part: Part, right: Whole, found: Whole, allowed: tuple[float, float], base: str
) -> tuple[int, int, str]:
    """The head and element that show the difference best, and what they show."""
    apart = difference(right.out, found.out)
    head, element = np.unravel_index(int(np.argmax(apart)), apart.shape)
    heads = int((apart.max(axis=-1) > allowed[0]).sum())
    text = (
        f"{heads} of {len(apart)} heads are not the merge in base {base}: "
        f"out{[*part.at(int(head)), int(element)]} is {found.out[head, element]:.5g}, "
        f"merged {right.out[head, element]:.5g}"
    )
    if not heads:
        text = f"out is the merge in base {base}, lse is not"
    return int(head), int(element), text
