"""How close attention on the processor comes to what the processor can do.

Decoding reads the whole cache for a few multiplications with each number, so memory is the limit,
or arithmetic where many query heads share a KV head (Williams, Waterman and Patterson, "Roofline",
Communications of the ACM 52(4), 2009). Both limits are measured here, in turn with the attention:
on a machine that others use too, a limit measured at another time says little.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from treeattn import partial
from treeattn.backends import cpu
from treeattn.backends.cpu import compile
from treeattn.errors import ArgumentError, BackendError
from treeattn.partial import Array
from treeattn.study import environment

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

    Raises `ArgumentError` for a number that is not positive and more than the machine has room for,
    `BackendError` where there are no compiled kernels.
    """
    problem = cpu.compiled_kernels_problem()
    if problem:
        raise BackendError(f"nothing to measure without compiled kernels: {problem}")
    if min(tokens, repeats, *groups, *threads) < 1:
        raise ArgumentError("tokens, groups, threads and repeats must be positive")
    itemsize = max(np.dtype(DTYPES[dtype]).itemsize for dtype in dtypes)
    needed, free = 2 * tokens * _KV_HEADS * HEAD_DIM * itemsize, environment.free_memory()
    if free is not None and needed > free:
        raise ArgumentError(
            f"a cache of {tokens:,} tokens takes {needed / 1e9:,.1f} GB, {free / 1e9:,.1f} GB are free: "
            "choose fewer tokens"
        )
    if max(threads) > cpu.MAX_THREADS:
        raise ArgumentError(f"{max(threads)} threads: {cpu.MAX_THREADS} are the most of one process")
    rows, reader = [], None
    for dtype in dtypes:
        k, v = (cache(tokens, DTYPES[dtype], seed) for seed in (1, 2))
        reader = reader or fastest_reader(k)
        for group in groups:
            for count in threads:
                rows.append({"dtype": dtype} | _row(reader, k, v, group, count, repeats))
                progress("{dtype} group {group} threads {threads}: {gb_s:.1f} GB/s".format(**rows[-1]))
    return {
        "read_rate_gb_s": max(row.pop("read_rate_gb_s") for row in rows),
        "reader": str(reader),
        "multiply_add_rate_g_s": max(row.pop("multiply_add_rate_g_s") for row in rows),
        "isa": compile.chosen_isa(),
        "way": cpu.fastest_way(),
        "rows": rows,
    }


def _row(reader: Reader, k: Array, v: Array, group: int, threads: int, repeats: int) -> dict[str, Any]:
    tokens, heads = k.shape[1], group * k.shape[2]
    q = np.random.default_rng(0).standard_normal((1, 1, heads, HEAD_DIM)).astype(k.dtype)
    records = partial.identity((1, heads, 1), HEAD_DIM)
    attention = cpu.PlannedAttention(records, scale=HEAD_DIM**-0.5, threads=threads)
    attention(q, k, v)  # allocates, and starts threads
    alone, together, step, rate = math.inf, math.inf, math.inf, 0.0
    for _ in range(repeats):
        alone = min(alone, reader.seconds(k, 1) + reader.seconds(v, 1))
        if threads > 1:
            together = min(together, reader.seconds(k, threads) + reader.seconds(v, threads))
        rate = max(rate, multiply_add_rate())
        step = min(step, seconds(lambda: attention(q, k, v), threads))
    size = k.nbytes + v.nbytes
    arithmetic = 2 * tokens * heads * HEAD_DIM / rate / threads
    return {
        "group": group,
        "tokens": tokens,
        "threads": threads,
        "gb_s": size / step / 1e9,
        "percent_of_read_rate": 100 * alone / step,
        "percent_of_bound": 100 * max(min(alone, together), arithmetic) / step,
        "microseconds": step * 1e6,
        "read_rate_gb_s": size / alone / 1e9,
        "multiply_add_rate_g_s": rate / 1e9,
    }


def multiply_add_rate() -> float:
    """Multiplications with an addition that one core does in a second, over about a millisecond."""
    run = compile.library(compile.chosen_isa()).multiply_and_add
    run.restype, result, done = ctypes.c_int64, ctypes.c_float(0.5), []
    taken = seconds(lambda: done.append(run(ctypes.c_int64(200_000), ctypes.byref(result))))
    return float(done[0] / taken)


def cache(tokens: int, dtype: DTypeLike, seed: int) -> Array:
    """Keys or values [1, tokens, kv_heads, head_dim]: random, but the same 1024 tokens again and again."""
    block = np.random.default_rng(seed).standard_normal((1024, _KV_HEADS, HEAD_DIM)).astype(dtype)
    return np.resize(block, (1, tokens, _KV_HEADS, HEAD_DIM))


class Reader(NamedTuple):
    """A way to read: read_memory of kernels/cpu/roofline.c, as compiled for an instruction set.

    streams: places read in turn; lines: of 64 bytes, of each place in a turn; ahead: lines from the one that
    is read to the one that is asked for, 0: none is.
    """

    isa: str
    streams: int
    lines: int
    ahead: int

    def __str__(self) -> str:
        return f"{self.isa}, streams {self.streams}, lines {self.lines}, ahead {self.ahead}"

    def read(self, array: Any, threads: int = 1) -> int:
        """Read an array once: the xor of its 32-bit words, less than 64 bytes at either end left out."""
        read_memory = compile.library(self.isa).read_memory
        read_memory.restype = ctypes.c_uint32
        numbers = map(ctypes.c_int32, (threads, *self[1:]))
        address, size = ctypes.c_void_p(array.ctypes.data), ctypes.c_int64(array.nbytes)
        return int(read_memory(address, size, *numbers))

    def seconds(self, array: Any, threads: int) -> float:
        return seconds(lambda: self.read(array, threads), threads)


def readers() -> list[Reader]:
    """Every way that is tried, with the instruction set in use and the narrower ones that the compiler has:
    ``TREEATTN_ISA`` stands for a processor without the wider."""
    isas = [isa for isa in compile.available_isas() if _is_compiled(isa)]
    isas = isas[isas.index(compile.chosen_isa()) :]
    return [Reader(*way) for way in itertools.product(isas, (1, 4, 8, 16, 32), (2, 8), (0, 2, 16))]


def _is_compiled(isa: str) -> bool:
    try:
        compile.library(isa)
    except BackendError:
        return False
    return True


def fastest_reader(array: Any) -> Reader:
    """The best of `readers()` at reading this array: all run, then the better ones again."""
    best = dict.fromkeys(readers(), math.inf)
    running = list(best)
    while len(running) > 1:
        for reader in running:
            best[reader] = min(best[reader], reader.seconds(array, 1))
        running = sorted(running, key=best.__getitem__)[: max(1, len(running) // 3)]
    return running[0]


def seconds(run: Callable[[], object], threads: int = 1) -> float:
    """Time of a call; of one thread its processor time, lest others on the machine count as slowness."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    start = clock()
    run()
    return clock() - start
