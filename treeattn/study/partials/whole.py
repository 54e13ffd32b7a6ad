"""Which merge of the parts reproduces the whole: what was done is found by doing it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from treeattn.errors import ArgumentError
from treeattn.partial import Array
from treeattn.reference import difference

#: Natural logarithm of a base, and which one it is mistaken for.
LOG = {"e": 1.0, "2": math.log(2)}
OTHER = {"e": "2", "2": "e"}

# What kernels of a type may be off by, relative to the largest |out|.
_TOLERANCES = {"float64": 1e-9, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, or (fault=False) that is worth knowing.

    kind: "wrong base", "counted twice", "left out", "not empty", "differs", "not a number", "unexplained".
    ranks: those that it is about. text: one line. numbers: the evidence.
    """

    kind: str
    ranks: tuple[int, ...]
    text: str
    numbers: dict[str, Any] = field(default_factory=dict)
    fault: bool = True


class Part(NamedTuple):
    """out [heads, head_dim] and natural lse [heads] in float64, whatever axes the heads had."""

    out: Array
    lse: Array
    seen: Array
    dtype: str
    shape: tuple[int, ...]

    def at(self, head: int) -> list[int]:
        """Where a head lies in lse."""
        return [int(index) for index in np.unravel_index(head, self.shape)]


def base_name(base: str | int) -> str:
    """ "e" or "2". Raises `ArgumentError`."""
    if str(base) not in LOG:
        raise ArgumentError(f"base {base!r} is unknown: use 'e' or 2")
    return str(base)


def read_part(whose: str, given: Mapping[str, Array], base: str) -> Part:
    """The ``out`` and ``lse`` of a dump. Raises `ArgumentError`."""
    out, lse = paired(whose, given)
    natural = lse.astype(np.float64).ravel() * LOG[base]
    flat = out.astype(np.float64).reshape(-1, out.shape[-1])
    return Part(flat, natural, np.isfinite(natural), out.dtype.name, lse.shape)


def paired(whose: str, given: Mapping[str, Array]) -> tuple[Array, Array]:
    """out [.., head_dim] and lse [..], their axes in one order. Raises `ArgumentError`."""
    for name in ("out", "lse"):
        if name not in given:
            raise ArgumentError(f"{whose}: no {name!r}, only {', '.join(sorted(given)) or 'nothing'}")
        check_type(whose, name, given[name])
    out, lse = given["out"], given["lse"]
    if lse.ndim > 1 and lse.shape != out.shape[:-1]:
        lse = np.swapaxes(lse, -1, -2)
    if out.ndim == 0 or out.shape[-1] == 0 or lse.shape != out.shape[:-1]:
        raise ArgumentError(
            f"{whose}: out has shape {list(out.shape)} and lse {list(given['lse'].shape)}: out is "
            "[.., head_dim], lse [..]"
        )
    return out, lse


def check_type(whose: str, name: str, array: Array) -> None:
    """Raise `ArgumentError` for what is not of a type that kernels write."""
    if array.dtype.name not in _TOLERANCES:
        raise ArgumentError(f"{whose}: {name} is {array.dtype}: one of {', '.join(_TOLERANCES)} is needed")


def tolerance(*dtypes: str) -> float:
    """What results of these types may be off by, relative to the largest |out|."""
    return max(_TOLERANCES[name] for name in dtypes)


def largest(parts: list[Part]) -> float:
    """The largest |out| of what was seen; 1 where there is none."""
    sizes = (np.abs(part.out[part.seen]) for part in parts)
    return max(float(np.where(np.isfinite(size), size, 0).max(initial=0.0)) for size in sizes) or 1.0


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
