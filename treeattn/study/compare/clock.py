"""One clock for all ranks: "last exit minus first entry" needs instants of different ranks on one scale.

Each rank reads the monotonic clock of its machine. Ranks whose processes share kernel and time namespace read
the very same clock. Every other clock is compared with rank 0's by ping-pong: the true difference lies within
half a round trip of the estimate, so the fastest of several round trips is kept (Cristian, "Probabilistic
clock synchronization", Distributed Computing 3, 1989). Clocks drift apart by microseconds per second, hence
they are compared before and after each block of measurements, and differences in between are interpolated.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from treeattn.collectives.runtime.process import kernel
from treeattn.mpi.communicators import MpiCommunicator

ROUND_TRIPS = 30


class Offset(NamedTuple):
    """What to add to this rank's clock to get rank 0's, in nanoseconds; its error; when it was found."""

    offset: int
    error: int
    at: int


class Clock:
    """The clocks of the ranks of `comm`. Creating it is collective.

    now: this rank's clock in nanoseconds. identity: equal on ranks that read the same clock; by default the
    boot of the kernel and the time namespace of the process.
    """

    def __init__(
        self,
        comm: MpiCommunicator,
        now: Callable[[], int] = time.perf_counter_ns,
        identity: str | None = None,
    ) -> None:
        self.comm = comm
        self.now = now
        clocks = comm.allgather(_identity() if identity is None else identity)
        self.count = len(set(clocks))
        # The lowest rank that reads each clock speaks for all that do.
        self._speaker = clocks.index(clocks[comm.rank])
        self._speakers = sorted({clocks.index(clock) for clock in clocks} - {0})

    def compare(self) -> Offset:
        """Estimate this rank's offset now. Collective."""
        if self.count == 1:
            return Offset(0, 0, self.now())
        mine = (0, 0)
        for speaker in self._speakers:
            if self.comm.rank == 0:
                self.comm.send(self._ping(speaker), speaker)
            elif self.comm.rank == speaker:
                self._answer()
                mine = self.comm.recv(source=0)
        offset, error = self.comm.allgather(mine)[self._speaker]
        return Offset(offset, error, self.now())

    def _ping(self, rank: int) -> tuple[int, int]:
        """(offset, error) of `rank`: rank 0's part of the exchange."""
        theirs = np.empty(1, np.int64)
        best = (1 << 62, 0)
        for _ in range(ROUND_TRIPS):
            asked = self.now()
            self.comm.Sendrecv(theirs, rank, recvbuf=theirs, source=rank)
            answered = self.now()
            best = min(best, (answered - asked, (asked + answered) // 2 - int(theirs[0])))
        return best[1], (best[0] + 1) // 2

    def _answer(self) -> None:
        time_here = np.empty(1, np.int64)
        ignored = np.empty(1, np.int64)
        for _ in range(ROUND_TRIPS):
            self.comm.Recv(ignored, source=0)
            time_here[0] = self.now()
            self.comm.Send(time_here, 0)


def on_common_clock(instants: Any, before: Offset, after: Offset) -> Any:
    """int64 instants of this rank's clock, on rank 0's: offsets change linearly between two comparisons."""
    share = (instants - before.at) / max(after.at - before.at, 1)
    return instants + before.offset + np.rint(share * (after.offset - before.offset)).astype(np.int64)


def _identity() -> str:
    try:
        namespace = os.readlink("/proc/self/ns/time")
    except OSError:  # a kernel older than time namespaces
        namespace = "none"
    return f"{kernel()} {namespace}"
