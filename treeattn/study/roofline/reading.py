"""The fastest way in which one core reads memory: what attention is measured against.

How many streams the hardware follows at once differs between processors: one reads 17 GB/s from 32 streams
and 13 from one, another 12 from 32 and 30 from one. So all ways that may be the best are tried.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from treeattn.backends.cpu import compile
from treeattn.errors import BackendError


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
