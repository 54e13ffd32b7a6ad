"""Finds out why partial results of several ranks do not add up, from dumps of them.

First what the parts show by themselves, then what each one's q, k and v say of it, then which merge
reproduces the whole: what was done is found by doing it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from treeattn import reference
from treeattn.attention import arrays
from treeattn.attention.arrays import AnyArray
from treeattn.errors import ArgumentError
from treeattn.partial import Array
from treeattn.reference import difference

# Natural logarithm of a base, and which one it is mistaken for.
_LOG = {"e": 1.0, "2": math.log(2)}
_OTHER = {"e": "2", "2": "e"}
# What kernels of a type may be off by, relative to the largest |out|.
_TOLERANCES = {"float64": 1e-9, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
_HARMLESS = 1e-6  # a weight that no result shows

_Dump = Mapping[str, Array]


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


def check_partials(
    parts: Sequence[Mapping[str, AnyArray]],
    whole: Mapping[str, AnyArray] | None = None,
    *,
    base: str | int = "e",
    scale: float | None = None,
) -> list[Finding]:
    """What is wrong with the partial results of ranks 0, 1, ..; an empty list if nothing is.

    parts: of each rank ``out`` [.., head_dim] and ``lse`` [..] (or with its last two axes exchanged, as
    flash-attention and `treeattn.decode` have it); perhaps ``merged_out`` and ``merged_lse``, what this rank
    held after the merge; perhaps ``q``, ``k`` and ``v`` as in `treeattn.decode`, with `scale`, default
    1 / sqrt(head_dim). whole: ``out`` and perhaps ``lse`` of all ranks, as suspected or as known; default
    what the first rank that tells held after the merge. base: of lse, as it is believed to be, ``"e"`` or 2.
    Arrays of any library that lie on the host.

    Raises `ArgumentError` for what is not such a dump.
    """
    if str(base) not in _LOG:
        raise ArgumentError(f"base {base!r} is unknown: use 'e' or 2")
    base = str(base)
    if not parts:
        raise ArgumentError("no part was given: pass the dump of every rank")
    given = [_on_host(part) for part in parts]
    read = [_read_part(f"rank {rank}", part, base) for rank, part in enumerate(given)]
    different = list(_unlike(read))
    if different:
        return different  # nothing below would mean anything
    found = [*_unwell(read, base), *_alike(read), *_merged_unlike(given)]
    found += [*_recomputed(given, read, base, scale), *_keys_held_twice(given)]
    if whole is not None:
        found += _explained(read, _on_host(whole), base)
    elif told := next((part for part in given if "merged_out" in part), None):
        merged = {name: told[f"merged_{name}"] for name in ("out", "lse") if f"merged_{name}" in told}
        found += _explained(read, merged, base)
    return found


def _on_host(dump: Mapping[str, AnyArray]) -> dict[str, Array]:
    return {name: arrays.on_host(name, array) for name, array in dump.items()}


class _Part(NamedTuple):
    """out [heads, head_dim] and natural lse [heads] in float64, whatever axes the heads had."""

    out: Array
    lse: Array
    seen: Array
    dtype: str
    shape: tuple[int, ...]

    def at(self, head: int) -> list[int]:
        """Where a head lies in lse."""
        return [int(index) for index in np.unravel_index(head, self.shape)]


def _read_part(whose: str, given: _Dump, base: str) -> _Part:
    """The ``out`` and ``lse`` of a dump. Raises `ArgumentError`."""
    out, lse = _paired(whose, given)
    natural = lse.astype(np.float64).ravel() * _LOG[base]
    flat = out.astype(np.float64).reshape(-1, out.shape[-1])
    return _Part(flat, natural, np.isfinite(natural), out.dtype.name, lse.shape)


def _paired(whose: str, given: _Dump) -> tuple[Array, Array]:
    """out [.., head_dim] and lse [..], their axes in one order. Raises `ArgumentError`."""
    for name in ("out", "lse"):
        if name not in given:
            raise ArgumentError(f"{whose}: no {name!r}, only {', '.join(sorted(given)) or 'nothing'}")
        _check_type(whose, name, given[name])
    out, lse = given["out"], given["lse"]
    if lse.ndim > 1 and lse.shape != out.shape[:-1]:
        lse = np.swapaxes(lse, -1, -2)
    if out.ndim == 0 or out.shape[-1] == 0 or lse.shape != out.shape[:-1]:
        raise ArgumentError(
            f"{whose}: out has shape {list(out.shape)} and lse {list(given['lse'].shape)}: out is "
            "[.., head_dim], lse [..]"
        )
    return out, lse


def _check_type(whose: str, name: str, array: Array) -> None:
    """Raise `ArgumentError` for what is not of a type that kernels write."""
    if array.dtype.name not in _TOLERANCES:
        raise ArgumentError(f"{whose}: {name} is {array.dtype}: one of {', '.join(_TOLERANCES)} is needed")


def _unlike(parts: list[_Part]) -> Iterator[Finding]:
    """Ranks whose shape or type is not that of most."""
    kinds = [f"{part.dtype} {[*part.shape, part.out.shape[-1]]}" for part in parts]
    usual = max(kinds, key=kinds.count)
    for rank, kind in enumerate(kinds):
        if kind != usual:
            yield Finding("differs", (rank,), f"rank {rank} holds out {kind}, most ranks {usual}")


def _unwell(parts: list[_Part], base: str) -> Iterator[Finding]:
    """Heads that saw nothing and are not marked so, and NaN."""
    total = _merged(parts).lse
    for rank, part in enumerate(parts):
        with np.errstate(invalid="ignore", over="ignore"):
            weight = np.where(part.seen, np.exp(part.lse - total), 0.0)
        yield from _weighty(rank, part, weight, base)
        says = "lse is {} in {}: -inf is what says that nothing was seen, in a merge of any kind"
        broken = part.seen & np.isnan(part.out).any(axis=-1)
        for kind, text, name, mark in (
            ("not empty", says, "+inf", part.lse == np.inf),
            ("not empty", says, "NaN", np.isnan(part.lse)),
            ("not a number", "out is {} beside a finite lse in {}", "NaN", broken),
        ):
            if mark.any():
                heads, first = int(mark.sum()), part.at(int(np.argmax(mark)))
                where = text.format(name, f"{heads} of {mark.size} heads, first {first}")
                yield Finding(kind, (rank,), f"rank {rank}: {where}", {"heads": heads, "head": first})


def _weighty(rank: int, part: _Part, weight: Array, base: str) -> Iterator[Finding]:
    """An out of nothing but zeros is what a kernel leaves that saw nothing."""
    zero = part.seen & (part.out == 0).all(axis=-1)
    if not zero.any():
        return
    head = int(np.argmax(np.where(zero, weight, -1)))
    share = float(weight[head])
    text = (
        f"rank {rank}: out is 0 and lse finite in {zero.sum()} of {zero.size} heads: if these saw nothing, "
        f"lse must be -inf; head {part.at(head)} has {part.lse[head] / _LOG[base]:.4g}, which takes "
        f"{share:.2g} of the weight"
    )
    numbers = {"heads": int(zero.sum()), "head": part.at(head), "weight": share}
    yield Finding("not empty", (rank,), text, numbers, fault=share > _HARMLESS)


def _alike(parts: list[_Part]) -> Iterator[Finding]:
    """Two ranks with the same results saw the same tokens."""
    allowed = _tolerance(parts[0].dtype) * _largest(parts)
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


def _merged_unlike(given: Sequence[_Dump]) -> Iterator[Finding]:
    """After the merge every rank must hold the same bits."""
    for name in ("merged_out", "merged_lse"):
        held = {rank: np.ascontiguousarray(part[name]) for rank, part in enumerate(given) if name in part}
        lacking = tuple(rank for rank in range(len(given)) if rank not in held)
        if held and lacking:
            text = f"{name} is not in the dumps of ranks {', '.join(map(str, lacking))}: not compared there"
            yield Finding("not compared", lacking, text, {}, fault=False)
        bits = {rank: array.tobytes() for rank, array in held.items()}
        count = Counter(bits.values())
        usual = max(bits, key=lambda rank: count[bits[rank]], default=0)
        for rank, array in held.items():
            if bits[rank] != bits[usual]:
                same = array.shape == held[usual].shape and array.size
                off = float(difference(array, held[usual]).max()) if same else math.nan
                text = f"rank {rank}: {name} is not that of rank {usual}, off by up to {off:.2g}"
                yield Finding("differs", (rank,), text, {"largest difference": off})


def _recomputed(
    given: Sequence[_Dump], parts: list[_Part], base: str, scale: float | None
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
            yield from _compared(rank, part, right, base, _tolerance(part.dtype) * values)


def _attention(rank: int, dump: _Dump, scale: float | None) -> _Part:
    q, k, v = (dump[name] for name in "qkv")
    fit = q.ndim == k.ndim == 4 and k.shape == v.shape and q.shape[::3] == k.shape[::3]
    if not fit or k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ArgumentError(
            f"rank {rank}: q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not fit: [batch, "
            "queries, heads, head_dim] and twice [batch, tokens, kv_heads, head_dim] are needed"
        )
    out, lse = reference.attention(q, k, v, scale=1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    return _read_part(f"rank {rank}", {"out": out, "lse": np.swapaxes(lse, 1, 2)}, "e")


def _compared(rank: int, part: _Part, right: _Part, base: str, allowed: float) -> Iterator[Finding]:
    """`part` is what the rank says, `right` what its tokens say; lse of both natural if `base` is true."""
    extra = part.seen & ~right.seen
    if extra.any():
        text = f"rank {rank}: lse is finite in {extra.sum()} heads that have no key to see"
        yield Finding("not empty", (rank,), text, {"heads": int(extra.sum())})
    both = part.seen & right.seen
    if not both.any():
        return
    mine, true = part.lse[both], right.lse[both]
    close = 1e-3 + 1e-4 * float(np.abs(true).max())
    off, other = float(np.abs(mine - true).max()), _OTHER[base]
    head = int(np.argmax(np.where(both, np.abs(part.lse - right.lse), -1)))
    if off > close and np.abs(mine * (_LOG[other] / _LOG[base]) - true).max() <= close:
        text = (
            f"rank {rank}: lse is in base {other}, not {base}: head {part.at(head)} has "
            f"{part.lse[head] / _LOG[base]:.4f}, and its keys give {right.lse[head] / _LOG[other]:.4f} in "
            f"base {other}, {right.lse[head] / _LOG[base]:.4f} in base {base}"
        )
        yield Finding("wrong base", (rank,), text, {"base": other, "head": part.at(head)})
    elif off > close:
        text = f"rank {rank}: lse is off by up to {off:.3g} from that of its keys: is the scale right?"
        yield Finding("differs", (rank,), text, {"largest difference of lse": off})
    off = float(np.abs(part.out - right.out)[both].max())
    if off > allowed:
        text = f"rank {rank}: out is off by up to {off:.3g} from attention over its own keys and values"
        yield Finding("differs", (rank,), text, {"largest difference of out": off})


def _keys_held_twice(given: Sequence[_Dump]) -> Iterator[Finding]:
    """Tokens with the same keys on two ranks; keys of zeros are room that is not used."""
    owners: dict[bytes, int] = {}
    for rank, dump in enumerate(given):
        if "k" not in dump or dump["k"].ndim != 4:
            continue
        tokens = [token.tobytes() for token in np.swapaxes(dump["k"], 0, 1) if token.any()]
        held = Counter(owners.setdefault(token, rank) for token in tokens)
        for owner in sorted(held.keys() - {rank}):
            of_all = f"{held[owner]} of the {len(tokens)} tokens of rank {rank}"
            text = f"{of_all} are on rank {owner} too, by their keys"
            yield Finding("counted twice", (owner, rank), text, {"tokens": held[owner]})


def _tolerance(*dtypes: str) -> float:
    """What results of these types may be off by, relative to the largest |out|."""
    return max(_TOLERANCES[name] for name in dtypes)


def _largest(parts: list[_Part]) -> float:
    """The largest |out| of what was seen; 1 where there is none."""
    sizes = (np.abs(part.out[part.seen]) for part in parts)
    return max(float(np.where(np.isfinite(size), size, 0).max(initial=0.0)) for size in sizes) or 1.0


class _Whole(NamedTuple):
    """A merged result: out [heads, head_dim], natural lse [heads]."""

    out: Array
    lse: Array


class _Mistake(NamedTuple):
    """What may have been done, and what would come of it; silent: it says nothing of lse."""

    kind: str
    ranks: tuple[int, ...]
    what: str
    whole: _Whole
    silent: bool = False


def _merged(parts: Sequence[_Part], times: Mapping[int, float] | None = None) -> _Whole:
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
        all_lse = np.where(total == 0, -np.inf, high + np.log(total))
        return _Whole(np.where(total[:, None] == 0, 0.0, mean), all_lse)


def _explained(parts: list[_Part], given: _Dump, base: str) -> Iterator[Finding]:
    """Nothing where the right merge reproduces the whole; else which wrong one does."""
    if "out" not in given or given["out"].size != parts[0].out.size:
        raise ArgumentError(f"the whole needs an out of {parts[0].out.size} elements, as each part has")
    _check_type("the whole", "out", given["out"])
    shape, types = parts[0].out.shape, {part.dtype for part in parts} | {given["out"].dtype.name}
    out, lse = given["out"].astype(np.float64).reshape(*parts[0].shape, shape[-1]), None
    allowed = _tolerance(*types) * _largest(parts)
    if "lse" in given:
        lse = _paired("the whole", {"out": out, "lse": given["lse"]})[1].astype(np.float64).ravel()
        lse = lse * _LOG[base]
        allowed_of_lse = 1e-3 + 1e-4 * float(np.abs(lse[np.isfinite(lse)]).max(initial=0.0))
    out = out.reshape(shape)

    def off(result: _Whole, silent: bool = False) -> float:
        """How far a merge is from the whole, in units of what is allowed."""
        far = float(difference(result.out, out).max(initial=0.0)) / allowed
        if lse is None or silent:
            return far
        return max(far, float(difference(result.lse, lse).max(initial=0.0)) / allowed_of_lse)

    right = _merged(parts)
    if off(right) <= 1:
        return
    tried = sorted((off(one.whole, one.silent), n, one) for n, one in enumerate(_mistakes(parts, base)))
    fits = [one for far, _, one in tried if far <= 1]
    apart = difference(right.out, out)
    head, element = map(int, np.unravel_index(int(np.argmax(apart)), apart.shape))
    where = f"out is the merge in base {base}, lse is not"
    if heads := int((apart.max(axis=-1) > allowed).sum()):
        where = (
            f"{heads} of {len(apart)} heads are not the merge in base {base}: "
            f"out{[*parts[0].at(head), element]} is {out[head, element]:.5g}, "
            f"merged {right.out[head, element]:.5g}"
        )
    numbers = {"head": parts[0].at(head), "off by": float(apart[head, element])}
    if not fits:
        text = f"no single mistake makes the whole of these parts, {tried[0][2].what} comes nearest; {where}"
        yield Finding("unexplained", (), text, numbers)
        return
    best, *others = fits
    to = float(difference(best.whole.out, out).max())
    also = "".join(f", as does {one.what}" for one in others[:2])
    that = best.whole.out[head, element]
    text = f"{best.what} makes the whole, to {to:.1e}{also}; {where}, {that:.5g} that way"
    yield Finding(best.kind, best.ranks, text, {**numbers, "reproduced to": to})


def _mistakes(parts: list[_Part], base: str) -> Iterator[_Mistake]:
    """lse of a mistaken base stays in that base: it is compared in units of the base that was meant."""
    every, other = tuple(range(len(parts))), _OTHER[base]
    ratio = _LOG[other] / _LOG[base]
    scaled = [part._replace(lse=part.lse * ratio) for part in parts]
    for ranks, merged, what in (
        (every, _merged(scaled), f"reading every lse in base {other}"),
        ((), _merged(parts), f"writing the lse of the whole in base {other}"),
    ):
        yield _Mistake("wrong base", ranks, what, merged._replace(lse=merged.lse / ratio))
    blind = tuple(rank for rank in every if not parts[rank].seen.all())
    if blind:
        what = "counting what saw nothing with lse 0 and out 0"
        yield _Mistake("not empty", blind, what, _merged(list(map(_taken_for_zero, parts))))
    for rank in every:
        mixed = [*parts[:rank], scaled[rank], *parts[rank + 1 :]]
        yield _Mistake("wrong base", (rank,), f"reading lse of rank {rank} in base {other}", _merged(mixed))
        yield _Mistake("counted twice", (rank,), f"counting rank {rank} twice", _merged(parts, {rank: 2.0}))
        yield _Mistake("left out", (rank,), f"leaving rank {rank} out", _merged(parts, {rank: 0.0}))
    even = _merged([part._replace(lse=np.zeros_like(part.lse)) for part in parts])
    yield _Mistake("unexplained", every, "averaging without weights", even, silent=True)


def _taken_for_zero(part: _Part) -> _Part:
    lse, out = np.where(part.seen, part.lse, 0.0), np.where(part.seen[:, None], part.out, 0.0)
    return part._replace(lse=lse, out=out, seen=np.ones_like(part.seen))
