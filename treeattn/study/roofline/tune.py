"""Which settings of the kernels read a cache fastest on this processor: measured once, and kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from treeattn import partial
from treeattn.backends import cpu
from treeattn.backends.cpu import compile, tuned
from treeattn.study.roofline.cpu import DTYPES, HEAD_DIM, cache, check
from treeattn.study.roofline.reading import seconds

_FASTER = 0.98  # a setting replaces another where it takes at most so much of its time


def tune(
    tokens: int = 65536,
    dtypes: Sequence[str] = tuple(DTYPES),
    repeats: int = 21,
    progress: Callable[[str], object] = lambda _: None,
) -> dict[str, Any]:
    """Measure the step of `treeattn.study.roofline.cpu.measure`, a query head for each KV head, with one
    setting after the other, and keep the fastest for each type: for the instruction set in use, on this
    processor.

    Returns a dictionary for JSON. ``rows``: for each case ``dtype``, ``setting``, ``number`` and
    ``microseconds``, the least of `repeats` in turn with the other numbers, and whether it is ``chosen``.
    ``isa``, ``file``: where the choice is kept; None where the defaults are the fastest, and nothing is.

    Raises `ArgumentError` and `BackendError` as `treeattn.study.roofline.cpu.measure` does.
    """
    check(tokens, dtypes, repeats)
    isa, rows = compile.chosen_isa(), []
    default = compile.default_settings(isa)
    chosen = {name: list(numbers) for name, numbers in default.items()}
    for name, numbers in tuned.SETTINGS.items():
        tried = {number: chosen | {name: [number] * len(tuned.TYPES)} for number in numbers}
        for dtype in dtypes:
            place = tuned.TYPES.index(dtype)
            taken = _measure(tokens, dtype, tried, repeats)
            best, now = min(taken, key=taken.__getitem__), chosen[name][place]
            if taken[best] > _FASTER * taken[now]:
                best = now
            for number, least in taken.items():
                row = {"dtype": dtype, "setting": name, "number": number, "microseconds": 1e6 * least}
                rows.append(row | {"chosen": number == best})
            progress(f"{name} {dtype}: {best}")
            chosen[name] = [best if at == place else number for at, number in enumerate(chosen[name])]
    path = compile.write_settings(isa, chosen)
    return {"isa": isa, "rows": rows, "file": None if chosen == default else str(path)}


def _measure(
    tokens: int, dtype: str, tried: dict[int, dict[str, list[int]]], repeats: int
) -> dict[int, float]:
    """Seconds of a step with each of the settings."""
    k, v = (cache(tokens, DTYPES[dtype], seed) for seed in (1, 2))
    q = np.random.default_rng(0).standard_normal((1, 1, k.shape[2], HEAD_DIM)).astype(k.dtype)
    steps = {}
    for number, settings in tried.items():
        with compile.trying(settings):
            records = partial.identity((1, k.shape[2], 1), HEAD_DIM)
            steps[number] = cpu.PlannedAttention(records, scale=HEAD_DIM**-0.5, threads=1)
            steps[number](q, k, v)
    taken = dict.fromkeys(tried, math.inf)
    for _ in range(repeats):
        for number, step in steps.items():
            taken[number] = min(taken[number], seconds(lambda step=step: step(q, k, v)))  # type: ignore[misc]
    return taken
