"""The timed loop, on one clock: all ranks enter at an agreed instant, and note when they leave each part.

A barrier would let ranks leave one after another, and that imbalance would be measured as the scheme's
(Hunold and Carpen-Amarie, "Reproducible MPI benchmarking is still not as easy as you think", TPDS 27(12),
2016). So before each iteration the ranks agree on an instant a little ahead, by one MPI_Allreduce(MAX), and
each waits for it on its own clock. Each rank asks for as much time ahead as it lately needed to learn of the
instant.

"Last exit minus first entry" needs instants of different ranks on one scale. Each rank reads the monotonic
clock of its machine. Ranks whose processes share kernel and time namespace read the very same clock. Every
other clock is compared with rank 0's by ping-pong: the true difference lies within half a round trip of the
estimate, so the fastest of several round trips is kept (Cristian, "Probabilistic clock synchronization",
Distributed Computing 3, 1989). Clocks drift apart by microseconds per second, hence they are compared before
and after each block of measurements, and differences in between are interpolated.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from treeattn.collectives.runtime.process import kernel
from treeattn.mpi import library
from treeattn.mpi.communicators import MpiCommunicator
from treeattn.partial import Array

ROUND_TRIPS = 30

# Nanoseconds. Above the most it is no longer the agreement that takes time, but others on the machine; across
# slow links it takes longer, and the most is twice what it was seen to take.
_LEAST_LEAD, _MOST_LEAD = 20_000, 2_000_000
_AGREEMENTS_SEEN = 9


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


class Times(NamedTuple):
    """What a loop gives on rank 0.

    instants: nanoseconds on rank 0's clock, [ranks, iterations, parts + 1]. late: iterations which some rank
    entered after the agreed instant. clock_error: microseconds, of the worst rank.
    """

    instants: Array
    late: int
    clock_error: float

    def samples(self, parts: Sequence[str] = ()) -> dict[str, list[float]]:
        """Series of microseconds, one value for each iteration; `parts` names the parts of more than one."""
        entry, leave = self.instants[:, :, 0], self.instants[:, :, -1]
        series = {
            "completion": leave.max(0) - entry.min(0),
            "after_last_entry": leave.max(0) - entry.max(0),
        }
        lengths = np.diff(self.instants, axis=2).max(0)
        series |= {name: lengths[:, index] for index, name in enumerate(parts)}
        return {
            name: [round(value / 1000, 3) for value in values.tolist()] for name, values in series.items()
        }

    def of_ranks(self) -> list[float]:
        """The median time of each rank in microseconds between its own entry and exit."""
        own = np.median(self.instants[:, :, -1] - self.instants[:, :, 0], axis=1)
        return [round(value / 1000, 3) for value in own.tolist()]


class Loop:
    """Timed loops on `comm`. Creating it is collective.

    oversubscribed: ranks outnumber cores, so whoever waits gives its core away.
    """

    def __init__(self, comm: MpiCommunicator, clock: Clock, oversubscribed: bool) -> None:
        self._comm, self._clock = comm, clock
        self._give_way: Callable[[], object] = os.sched_yield if oversubscribed else tuple
        self._mine, self._agreed = np.empty(1, np.int64), np.empty(1, np.int64)
        self._lead = _LEAST_LEAD
        self._most_lead = max(_MOST_LEAD, 2 * self._time_of_agreement())

    @property
    def lead(self) -> float:
        """Microseconds between the agreement on an instant and the instant that this rank asks for."""
        return self._lead / 1000

    def _time_of_agreement(self) -> int:
        """Median of a few agreements, after one that connects the ranks, on the slowest rank."""
        instants = [self._clock.now()]
        for _ in range(1 + _AGREEMENTS_SEEN):
            self._agree(0)
            instants.append(self._clock.now())
        return self._agree(int(np.median(np.diff(instants)[1:])))

    def _adapt_lead(self, late_by: int) -> None:
        if late_by > 0:
            self._lead = min(self._lead + late_by, self._most_lead)
        else:
            self._lead = max(self._lead - self._lead // 64, _LEAST_LEAD)

    def _agree(self, mine: int) -> int:
        self._mine[0] = mine
        self._comm.Allreduce(self._mine, self._agreed, library.load().MAX)
        return int(self._agreed[0])

    def agree_on_slowest(self, mine: float) -> float:
        """The largest value of all ranks. Collective."""
        return float(self._comm.allreduce(mine, library.load().MAX))

    def run(
        self,
        parts: Sequence[Callable[[], object]],
        prepare: Callable[[], object],
        iterations: int,
    ) -> Times | None:
        """Time `parts`, called in order after `prepare`; the times on rank 0. Collective."""
        before = self._clock.compare()
        collecting = gc.isenabled()
        gc.disable()
        try:
            instants, late = self._timed(parts, prepare, before.offset, iterations)
        finally:
            if collecting:
                gc.enable()
        return self._gathered(instants, late, before, self._clock.compare())

    def _timed(
        self,
        parts: Sequence[Callable[[], object]],
        prepare: Callable[[], object],
        offset: int,
        iterations: int,
    ) -> tuple[list[int], list[bool]]:
        """Instants of this rank's clock, parts + 1 for each iteration, and whether it came too late."""
        now, give_way = self._clock.now, self._give_way
        instants: list[int] = []
        note = instants.append
        late = []
        for _ in range(iterations):
            prepare()
            start = self._agree(now() + offset + self._lead) - offset
            late_by = now() - start
            late.append(late_by > 0)
            self._adapt_lead(late_by)
            while now() < start:
                give_way()
            note(now())
            for part in parts:
                part()
                note(now())
        return instants, late

    def _gathered(self, instants: list[int], late: list[bool], before: Offset, after: Offset) -> Times | None:
        mine = on_common_clock(np.array(instants, np.int64), before, after)
        everyone = self._comm.gather((mine, late, max(before.error, after.error)), root=0)
        if everyone is None:
            return None
        return Times(
            np.array([of_rank[0] for of_rank in everyone]).reshape(len(everyone), len(late), -1),
            int(np.any([of_rank[1] for of_rank in everyone], axis=0).sum()),
            max(of_rank[2] for of_rank in everyone) / 1000,
        )
