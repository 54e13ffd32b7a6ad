"""Finds out why partial results of several ranks do not add up: each fault is looked for by making it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from treeattn.attention import arrays
from treeattn.errors import ArgumentError
from treeattn.partial import Array
from treeattn.reference import difference

_LOG = {"e": 1.0, "2": math.log(2)}  # natural logarithms of the bases
# What kernels of a type may be off by, relative to the largest |out|.
_TOLERANCES = {"float64": 1e-9, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


class Suspect(NamedTuple):
    """One thing that is wrong with these ranks, or (fault=False) that is worth knowing."""

    kind: str
    ranks: tuple[int, ...]
    text: str
    fault: bool = True


class _Part(NamedTuple):
    """out [heads, head_dim] and natural lse [heads] in float64, whatever axes the heads had."""

    out: Array
    lse: Array


def check_partials(
    parts: Sequence[Mapping[str, Any]], whole: Mapping[str, Any] | None = None, *, base: str | int = "e"
) -> list[Suspect]:
    """What is wrong with the partial results of ranks 0, 1, ..; an empty list if nothing is.

    parts: of each rank ``out`` [.., head_dim] and ``lse`` [..] (its last two axes in any order), host arrays
    of any library. whole: what was made of them, ``out`` and perhaps ``lse``. base: of lse as it is believed
    to be, ``"e"`` or 2. Raises `ArgumentError` for what is no dump.
    """
    base = str(base)
    if base not in _LOG or not parts:
        raise ArgumentError("no part was given" if base in _LOG else f"base {base} is unknown: use 'e' or 2")
    dumps = [{name: arrays.on_host(name, array) for name, array in part.items()} for part in parts]
    read = [_read(f"rank {rank}", dump, base) for rank, dump in enumerate(dumps)]
    kinds = dict.fromkeys(f"{dump['out'].dtype} {list(dump['out'].shape)}" for dump in dumps)
    if len(kinds) > 1:
        raise ArgumentError(f"the parts are unlike: out is {', '.join(kinds)}")
    out = dumps[0]["out"]
    near = max(_TOLERANCES[dump[name].dtype.name] for dump in dumps for name in ("out", "lse"))
    found = [finding for rank in range(len(read)) for finding in _unwell(rank, read, near, base)]
    if whole is not None:
        given = {name: arrays.on_host(name, array) for name, array in whole.items()}
        if "out" not in given or given["out"].size != out.size:
            raise ArgumentError(f"the whole needs an out of {out.size} elements, as each part has")
        placed = {"lse": dumps[0]["lse"], **given, "out": given["out"].reshape(out.shape)}
        held, near = _read("the whole", placed, base), max(near, _TOLERANCES[given["out"].dtype.name])
        found += _explained(read, held, near, base, "lse" in given)
    return found


def _read(whose: str, given: Mapping[str, Array], base: str) -> _Part:
    for name in ("out", "lse"):
        kind = str(given[name].dtype) if name in given else "not there"
        if kind not in _TOLERANCES:
            raise ArgumentError(f"{whose}: {name} is {kind}: one of {', '.join(_TOLERANCES)} is needed")
    out, lse = given["out"], given["lse"]
    if lse.ndim > 1 and lse.shape != out.shape[:-1]:
        lse = np.swapaxes(lse, -1, -2)
    if out.ndim == 0 or out.shape[-1] == 0 or lse.shape != out.shape[:-1]:
        shapes = f"out has shape {list(out.shape)} and lse {list(given['lse'].shape)}"
        raise ArgumentError(f"{whose}: {shapes}: out is [.., head_dim], lse [..]")
    out, lse = (
        out.astype(np.float64).reshape(lse.size, out.shape[-1]),
        lse.astype(np.float64).ravel() * _LOG[base],
    )
    return _Part(np.where(np.isfinite(lse)[:, None], out, 0), lse)


def _merged(parts: Sequence[_Part]) -> _Part:
    lse = np.stack([np.where(np.isfinite(part.lse), part.lse, -np.inf) for part in parts])
    out = np.stack([part.out for part in parts])
    with np.errstate(all="ignore"):
        high = lse.max(axis=0)
        weight = np.where(lse == -np.inf, 0, np.exp(lse - high))
        total = weight.sum(axis=0)
        mean = np.where(total[:, None] == 0, 0, (weight[..., None] * out).sum(axis=0) / total[:, None])
        return _Part(mean, np.where(total == 0, -np.inf, high + np.log(total)))


def _unwell(rank: int, parts: list[_Part], near: float, base: str) -> Iterator[Suspect]:
    """What a part shows by itself."""
    out, lse = parts[rank]
    seen, zero = np.isfinite(lse), (out == 0).all(axis=-1)
    with np.errstate(all="ignore"):
        share = np.where(seen & zero, np.exp(lse - _merged(parts).lse), 0).max(initial=0.0)
    weighs = f"out is 0 and has {share:.2g} of the weight: if it saw nothing, lse must be -inf"
    for kind, what, mark, fault in (
        ("not empty", "lse is +inf or NaN: -inf says that nothing was seen", ~(lse < np.inf), True),
        ("not a number", "out is NaN beside a finite lse", seen & np.isnan(out).any(axis=-1), True),
        ("not empty", weighs, seen & zero, bool(share > 1e-6)),
    ):
        if mark.any():
            where = f"{mark.sum()} of {mark.size} heads, first {mark.argmax()}"
            yield Suspect(kind, (rank,), f"rank {rank}: {what}; in {where}", fault)
    if len(values := np.unique(lse[seen & ~zero])) == 1 and (values[0] == 0 or lse.size > 1):
        text = f"rank {rank}: lse is exactly {values[0] / _LOG[base]:.4g} in all heads: was it written?"
        yield Suspect("constant", (rank,), text, fault=not values[0])
    for before, (its_out, its_lse) in enumerate(parts[:rank]):  # the same results are of the same tokens
        if out.any() and _off(lse, its_lse) <= 1e-4 and _off(out, its_out) <= near * _largest(out):
            yield Suspect("counted twice", (before, rank), f"ranks {before} and {rank} hold the same part")


def _off(one: Array, other: Array) -> float:
    return float(difference(one, other).max(initial=0.0))


def _explained(parts: list[_Part], whole: _Part, near: float, base: str, has_lse: bool) -> Iterator[Suspect]:
    """Which single mistake makes the out, and which the lse, where the right merge does not."""
    other, right = "2" if base == "e" else "e", _merged(parts)
    ratio = _LOG[other] / _LOG[base]
    changes: list[tuple[str, str, Callable[[Array], Array]]] = [
        ("wrong base", f"reading lse of {{}} in base {other}", lambda lse: lse * ratio),
        ("counted twice", "counting {} twice", lambda lse: lse + math.log(2)),
        ("left out", "leaving {} out", partial(np.full_like, fill_value=-np.inf)),
        ("not empty", "taking for 0 what {} has not seen", partial(np.nan_to_num, posinf=0, neginf=0)),
        ("unweighted", "taking lse of {} for 0", np.zeros_like),
    ]
    tried: list[tuple[str, Sequence[int], str, _Part]] = [("wrong base", (), "the right merge", right)]
    each = [*(([rank], f"rank {rank}") for rank in range(len(parts))), (range(len(parts)), "every rank")]
    for (ranks, who), (kind, what, change) in itertools.product(each, changes):
        changed = [_Part(out, change(lse) if r in ranks else lse) for r, (out, lse) in enumerate(parts)]
        if any(not np.array_equal(one.lse, part.lse) for one, part in zip(changed, parts, strict=True)):
            tried.append((kind, ranks, what.format(who), _merged(changed)))
    bounds = near * _largest(right.out), 1e-3 + 1e-4 * _largest(right.lse)
    of_out = [one for one in tried if _off(one[3].out, whole.out) <= bounds[0]]
    yield from _told("out", of_out, _off(right.out, whole.out), "")
    units = ((1, ""), (ratio, f", written in base {other},")) if has_lse else ()
    for pool, (unit, written) in itertools.product((of_out, tried), units):
        of_lse = [one for one in pool if _off(one[3].lse, whole.lse * unit) <= bounds[1]]
        if of_lse or (pool is tried and written):
            yield from _told("lse", of_lse, _off(right.lse, whole.lse), written)
            return


def _told(name: str, fits: list[Any], off: float, written: str) -> Iterator[Suspect]:
    """Where mistakes of several ranks would make it, none is blamed."""
    if not fits:
        yield Suspect("unexplained", (), f"no mistake tried makes the {name} of the whole, off by {off:.2g}")
    elif fits[0][1] or written:
        what = " or ".join(one[2] for one in fits[:3])
        ranks = set.intersection(*(set(one[1]) for one in fits))
        yield Suspect(fits[0][0], tuple(sorted(ranks)), f"{what}{written} makes the {name} of the whole")


def _largest(values: Array) -> float:
    return float(np.abs(values[np.isfinite(values)]).max(initial=0.0))
