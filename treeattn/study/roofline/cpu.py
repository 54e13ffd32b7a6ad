"""How close attention on the processor comes to what the processor can do.

Decoding reads the whole cache for a few multiplications with each number, so memory is the limit,
or arithmetic where many query heads share a KV head (Williams, Waterman and Patterson, "Roofline",
Communications of the ACM 52(4), 2009). Both limits are measured here, in turn with the attention:
on a machine that others use too, a limit measured at another time says little.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from treeattn import partial
from treeattn.backends import cpu
from treeattn.backends.cpu import compile
from treeattn.errors import ArgumentError, BackendError
from treeattn.partial import Array
from treeattn.study import environment
from treeattn.study.roofline.reading import Reader, fastest_reader, seconds

#: Types of the cache, by name.
DTYPES: dict[str, Any] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}

_KV_HEADS = 8
HEAD_DIM = 128


def measure(
    tokens: int = 65536,
    dtypes: Sequence[str] = tuple(DTYPES),
    groups: Sequence[int] = (1, 4),
    threads: Sequence[int] = (1,),
    repeats: int = 7,
    progress: Callable[[str], object] = lambda _: None,
) -> dict[str, Any]:
    """Measure a decoding step: one query, 8 KV heads, head_dim 128, cache as [1, tokens, heads, head_dim].

    tokens: length of the context. dtypes: names from `DTYPES`. groups: numbers of query heads per KV head.
    threads: numbers of threads. repeats: how often limits and attention are run in turn; the best of each
    counts. progress: called with a line of text for each row.

    Returns a dictionary for JSON. ``read_rate_gb_s``: what one core reads at best, in 10^9 bytes per second;
    ``reader``: in which way. ``rows``: for each case ``dtype``, ``group``, ``tokens``, ``threads``; ``gb_s``:
    bytes of the cache per second; ``percent_of_read_rate``: of one core's beside this case;
    ``percent_of_bound``: of the slower of reading and arithmetic with that many threads; ``microseconds``.
    Also the ``isa`` and the ``way`` of reading in use, and ``multiply_add_rate_g_s``, 10^9 per second.

    Raises `ArgumentError` for an unknown type, a number that is not positive and more than the machine has
    room for, `BackendError` where there are no compiled kernels.
    """
    problem = cpu.compiled_kernels_problem()
    if problem:
        raise BackendError(f"nothing to measure without compiled kernels: {problem}")
    check(dtypes, tokens, repeats, *groups, *threads)
    itemsize = max(np.dtype(DTYPES[dtype]).itemsize for dtype in dtypes)
    needed, free = 2 * tokens * _KV_HEADS * HEAD_DIM * itemsize, environment.free_memory()
    if free is not None and needed > free:
        raise ArgumentError(
            f"a cache of {tokens:,} tokens takes {needed / 1e9:,.1f} GB, {free / 1e9:,.1f} GB are free: "
            "choose fewer tokens"
        )
    if max(threads) > cpu.MAX_THREADS:
        raise ArgumentError(f"{max(threads)} threads: {cpu.MAX_THREADS} are the most of one process")
    limits = Limits(compile.library(compile.chosen_isa()))
    rows = []
    for dtype in dtypes:
        k, v = (cache(tokens, DTYPES[dtype], seed) for seed in (1, 2))
        for group in groups:
            for count in threads:
                rows.append(_row(limits, k, v, group, count, repeats) | {"dtype": dtype})
                progress("{dtype} group {group} threads {threads}: {gb_s:.1f} GB/s".format(**rows[-1]))
    return {
        "read_rate_gb_s": max((row.pop("read_rate_gb_s") for row in rows), default=math.nan),
        "reader": str(limits.reader),
        "multiply_add_rate_g_s": limits.multiply_add_rate / 1e9,
        "isa": compile.chosen_isa(),
        "way": cpu.fastest_way(),
        "rows": rows,
    }


def check(dtypes: Sequence[str], *counts: int) -> None:
    """Raise `ArgumentError` for an unknown type, and for a number that is not positive."""
    unknown = set(dtypes) - set(DTYPES)
    if unknown:
        raise ArgumentError(f"dtype {', '.join(sorted(unknown))}: choose from {', '.join(DTYPES)}")
    if min(counts) < 1:
        raise ArgumentError("tokens, heads, groups, threads and repeats must be positive")


def _row(limits: Limits, k: Array, v: Array, group: int, threads: int, repeats: int) -> dict[str, Any]:
    tokens, heads = k.shape[1], group * k.shape[2]
    q = np.random.default_rng(0).standard_normal((1, 1, heads, HEAD_DIM)).astype(k.dtype)
    records = partial.identity((1, heads, 1), HEAD_DIM)
    attention = cpu.PlannedAttention(records, scale=HEAD_DIM**-0.5, threads=threads)
    attention(q, k, v)  # allocates, and starts threads
    alone, together, step = (math.inf,) * 3
    for _ in range(repeats):
        alone = min(alone, limits.read_time(k, 1) + limits.read_time(v, 1))
        if threads > 1:
            together = min(together, limits.read_time(k, threads) + limits.read_time(v, threads))
        limits.run_arithmetic()
        step = min(step, seconds(lambda: attention(q, k, v), threads))
    size = k.nbytes + v.nbytes
    arithmetic = 2 * tokens * heads * HEAD_DIM / limits.multiply_add_rate / threads
    return {
        "dtype": "",
        "group": group,
        "tokens": tokens,
        "threads": threads,
        "gb_s": size / step / 1e9,
        "percent_of_read_rate": 100 * alone / step,
        "percent_of_bound": 100 * max(min(alone, together), arithmetic) / step,
        "microseconds": step * 1e6,
        "read_rate_gb_s": size / alone / 1e9,
    }


class Limits:
    """The yardsticks of kernels/cpu/roofline.c."""

    multiply_add_rate = 0.0
    reader: Reader | None = None

    def __init__(self, kernels: ctypes.CDLL) -> None:
        self._kernels = kernels
        kernels.multiply_and_add.restype = ctypes.c_int64

    def read_time(self, array: Array, threads: int) -> float:
        """Seconds to read an array once, in the way that was the fastest for the first one."""
        self.reader = self.reader or fastest_reader(array)
        return self.reader.seconds(array, threads)

    def run_arithmetic(self) -> None:
        """Multiply and add for about a millisecond, and remember the best rate."""
        done = 0
        result = ctypes.c_float(0.5)

        def run() -> None:
            nonlocal done
            done = self._kernels.multiply_and_add(ctypes.c_int64(200_000), ctypes.byref(result))

        taken = seconds(run)
        self.multiply_add_rate = max(self.multiply_add_rate, done / taken)


def cache(tokens: int, dtype: DTypeLike, seed: int) -> Array:
    """Keys or values [1, tokens, kv_heads, head_dim]: random, but the same 1024 tokens again and again."""
    block = np.random.default_rng(seed).standard_normal((1024, _KV_HEADS, HEAD_DIM)).astype(dtype)
    return np.resize(block, (1, tokens, _KV_HEADS, HEAD_DIM))
