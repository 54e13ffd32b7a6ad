"""Laps on a GPU, for gpu.py, which times attention in turn with a device-to-device copy.

A copy of n bytes moves 2n: n are read and n are written. Percent of copy rate is the bytes of the cache that
attention reads per second, against 2n over the time of the copy.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from treeattn.backends import cuda
from treeattn.backends.cuda import cupy_runtime
from treeattn.collectives.runtime.cuda_graph import CudaGraph


class CupyStopwatch:
    """Times what is queued on CuPy's current device. Raises `BackendError` without CuPy, driver or GPU."""

    def __init__(self) -> None:
        """Time on the device that is current now."""
        #: The device, for the kernels.
        self.runtime = cupy_runtime.current()
        self._cuda = self.runtime.namespace.cuda
        #: Size of the L2 cache.
        self.l2_bytes = int(self._cuda.Device().attributes["L2CacheSize"])
        # Not "non-blocking": arrays are made on the default stream, and work here has to wait for that.
        self._stream = self._cuda.Stream()

    def laps(self, runs: Sequence[Callable[[], object]]) -> list[float]:
        """Seconds on the device between CUDA events around each run."""
        events = [self._cuda.Event() for _ in range(len(runs) + 1)]
        with self._stream as stream:
            stream.synchronize()
            events[0].record(stream)
            for run, event in zip(runs, events[1:], strict=True):
                run()
                event.record(stream)
            events[-1].synchronize()
        return [self._cuda.get_elapsed_time(*pair) / 1e3 for pair in itertools.pairwise(events)]

    def host_seconds(self, run: Callable[[], object], calls: int) -> float:
        """Seconds of the host for one call, the device not waited for."""
        with self._stream as stream:
            run()
            stream.synchronize()
            began = time.perf_counter()
            for _ in range(calls):
                run()
            taken = time.perf_counter() - began
            stream.synchronize()
        return taken / calls


def captured(runtime: cuda.Runtime, calls: Sequence[Callable[[], object]]) -> CudaGraph:
    """All calls as one graph, after they ran once: that compiles and allocates."""
    lap = CudaGraph(runtime, lambda: [call() for call in calls])
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
    repeat(runtime, source, upload_random(runtime, (min(size, 1 << 20),), "float8_e4m3fn"))
    return functools.partial(runtime.copy, into, source), 2 * size


def upload_random(runtime: cuda.Runtime, shape: tuple[int, ...], dtype: str, seed: int = 0) -> Any:
    """The bits of random numbers, of a type of ml_dtypes, on the device."""
    numbers = np.random.default_rng(seed).standard_normal(shape).astype(getattr(ml_dtypes, dtype))
    bits = numbers.view(f"u{numbers.itemsize}")
    moved = runtime.empty(shape, bits.dtype)
    runtime.upload(moved, bits)
    return moved


def repeat(runtime: cuda.Runtime, into: Any, block: Any) -> None:
    """Fill an array of the device along its first axis."""
    for begin in range(0, len(into), len(block)):
        part = into[begin : begin + len(block)]
        runtime.copy(part, block[: len(part)])
