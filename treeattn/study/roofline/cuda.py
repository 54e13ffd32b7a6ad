"""How close attention on a GPU comes to what the GPU's memory delivers.

The mark is the device-to-device copy rate, measured in turn with the attention in the same run. A copy of
n bytes moves 2n: n are read and n are written. **Percent of copy rate** is the bytes of the cache that
attention reads per second, against 2n over the time of the copy. Reading alone can be a little faster than
copying, so that more than 100 is possible.

The L2 cache is cold: steps go around among caches of keys and values so that more than twice its size is
read between two uses of one. A lap is one launch of a CUDA graph that holds a step for each of them; laps
are enqueued one behind the other after a copy that nobody times, so that the device never waits for the
host, and CUDA events lie between them.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from treeattn.backends import cuda
from treeattn.collectives.runtime.cuda_graph import CudaGraph
from treeattn.study.roofline.cpu import DTYPES, HEAD_DIM, check

if TYPE_CHECKING:
    from treeattn.backends.cuda.cupy_stopwatch import CupyStopwatch

_BLOCK = 1024  # tokens of random numbers, repeated along a cache
_HOST_CALLS = 20


def measure(
    tokens: int = 65536,
    dtypes: Sequence[str] = tuple(DTYPES),
    groups: Sequence[int] = (1, 4),
    repeats: int = 21,
    progress: Callable[[str], object] = lambda _: None,
    *,
    kv_heads: int = 8,
    stopwatch: CupyStopwatch | None = None,
) -> dict[str, Any]:
    """Measure a decoding step: one query, head_dim 128, cache as [1, tokens, kv_heads, head_dim].

    tokens: length of the context. dtypes: names from `treeattn.study.roofline.cpu.DTYPES`. groups: numbers of
    query heads per KV head. repeats: how often copy and attention are run in turn; the median of each counts.
    progress: called with a line of text for each row. stopwatch: the device; None is CuPy's current one.

    Returns a dictionary for JSON. ``copy_rate_gb_s``: 10^9 bytes per second, read and written, the median
    over the rows. ``rows``: for each case ``dtype``, ``group``, ``tokens``, ``kv_heads``; ``microseconds`` of
    a step on the device; ``gb_s``: bytes of the cache per second; ``copy_rate_gb_s`` beside this row and
    ``percent_of_copy_rate``; ``host_microseconds``: of the host for a planned step; ``caches``: among how
    many steps went around. ``device``: its name, driver, CUDA, clocks and power.

    Raises `ArgumentError` for an unknown type and a number that is not positive, `BackendError` without a
    GPU, CuPy or NVRTC, or enough memory on the GPU.
    """
    check(dtypes, tokens, repeats, kv_heads, *groups)
    if stopwatch is None:
        from treeattn.backends.cuda import cupy_stopwatch  # CuPy is only looked for when a GPU is asked for

        stopwatch = cupy_stopwatch.CupyStopwatch()
    copy, moved = copy_lap(stopwatch)
    rows: list[dict[str, Any]] = []
    for dtype in dtypes:
        caches = cold_caches(stopwatch, tokens, kv_heads, dtype)
        for group in groups:
            row = _row(stopwatch, caches, group, copy, moved, repeats)
            rows.append({"dtype": dtype, "group": group} | row)
            progress(
                "{dtype} group {group}: {percent_of_copy_rate:.0f} % of the copy rate".format(**rows[-1])
            )
        del caches  # before the next ones are made: they may fill the memory
    return {
        "copy_rate_gb_s": statistics.median(row["copy_rate_gb_s"] for row in rows),
        "device": stopwatch.facts(),
        "rows": rows,
    }


def _row(
    stopwatch: CupyStopwatch, caches: Any, group: int, copy: Callable[[], object], moved: int, repeats: int
) -> dict[str, Any]:
    """One case: a copy of `moved` bytes, a step on the device, and a step on the host."""
    runtime, (k, v) = stopwatch.runtime, caches[0]
    q = upload_random(runtime, (1, 1, group * k.shape[2], HEAD_DIM), k.dtype)
    records = runtime.empty((1, group * k.shape[2], 1, HEAD_DIM + 2), np.float32)
    attention = cuda.PlannedAttention(records, scale=HEAD_DIM**-0.5, runtime=runtime)
    lap = captured(runtime, [functools.partial(attention, q, *cache) for cache in caches])
    copying, around = median_laps(stopwatch, [copy, lap], copy, repeats)
    host = stopwatch.host_seconds(functools.partial(attention, q, *caches[-1]), _HOST_CALLS)
    step, size, rate = around / len(caches), k.nbytes + v.nbytes, moved / copying
    return {
        "tokens": k.shape[1],
        "kv_heads": k.shape[2],
        "microseconds": step * 1e6,
        "gb_s": size / step / 1e9,
        "percent_of_copy_rate": 100 * size / step / rate,
        "copy_rate_gb_s": rate / 1e9,
        "host_microseconds": host * 1e6,
        "caches": len(caches),
    }


def captured(runtime: cuda.Runtime, calls: Sequence[Callable[[], object]]) -> CudaGraph:
    """All calls as one graph, after they ran once: that compiles and allocates."""

    def run() -> None:
        for call in calls:
            call()

    lap = CudaGraph(runtime, run)
    lap()
    lap.record()
    return lap


def median_laps(
    stopwatch: CupyStopwatch, runs: Sequence[Callable[[], object]], lead: Callable[[], object], repeats: int
) -> list[float]:
    """Median seconds of each of `runs`, run in turn; `lead` goes first each time and is not timed."""
    laps = [stopwatch.laps([lead, *runs])[1:] for _ in range(repeats)]
    return [statistics.median(times) for times in zip(*laps, strict=True)]


def copy_lap(stopwatch: CupyStopwatch) -> tuple[Callable[[], object], int]:
    """A copy on the device of eight times its L2 cache, and how many bytes it moves: read and written."""
    runtime, size = stopwatch.runtime, 8 * stopwatch.l2_bytes
    into, source = (runtime.empty((size,), np.uint8) for _ in range(2))
    block = _upload(runtime, np.random.default_rng(0).integers(0, 256, min(size, 1 << 20), np.uint8))
    _fill(runtime, source, block)
    return functools.partial(runtime.copy, into, source), 2 * size


def cold_caches(stopwatch: CupyStopwatch, tokens: int, kv_heads: int, dtype: str) -> list[tuple[Any, Any]]:
    """Pairs of keys and values [1, tokens, kv_heads, HEAD_DIM] on the device, for steps to go around among.

    So many that more than twice the L2 cache is read between two uses of one pair; two at least. bfloat16
    is held as uint16.
    """
    element = np.dtype(np.uint16 if dtype == "bfloat16" else DTYPES[dtype])
    row = kv_heads * HEAD_DIM
    count = 1 + max(1, math.ceil(2 * stopwatch.l2_bytes / (2 * tokens * row * element.itemsize)))
    shape = (_BLOCK, kv_heads, HEAD_DIM)
    blocks = [upload_random(stopwatch.runtime, shape, element, seed) for seed in (1, 2)]

    def cache(block: Any) -> Any:
        array = stopwatch.runtime.empty((1, tokens, kv_heads, HEAD_DIM), element)
        _fill(stopwatch.runtime, array[0], block)
        return array

    return [(cache(blocks[0]), cache(blocks[1])) for _ in range(count)]


def _fill(runtime: cuda.Runtime, array: Any, block: Any) -> None:
    """Copies of `block` one behind the other along the first axis."""
    for begin in range(0, len(array), len(block)):
        part = array[begin : begin + len(block)]
        runtime.copy(part, block[: len(part)])


def upload_random(runtime: cuda.Runtime, shape: tuple[int, ...], element: Any, seed: int = 0) -> Any:
    """Random numbers on the device; of type uint16 the bits of bfloat16."""
    numbers = np.random.default_rng(seed).standard_normal(shape)
    if element == np.uint16:
        return _upload(runtime, numbers.astype(DTYPES["bfloat16"]).view(np.uint16))
    return _upload(runtime, numbers.astype(element))


def _upload(runtime: cuda.Runtime, array: Any) -> Any:
    moved = runtime.empty(array.shape, array.dtype)
    runtime.upload(moved, array)
    return moved
