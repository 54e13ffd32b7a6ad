"""Runs one schedule on one MPI communicator: planned once, then nothing but messages and merges.

A planned reducer owns a private duplicate of the communicator, scratch space for what it receives, and
persistent requests (MPI standard, section 3.9): a step starts them round by round and allocates nothing.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from treeattn.collectives.check import Certificate, Fold, prove
from treeattn.collectives.operator import Operator
from treeattn.collectives.schedule import Round, Schedule
from treeattn.errors import ScheduleError

__all__ = ["Reducer"]


class _PlannedRound(NamedTuple):
    """What one rank does in one round: start and complete `requests`, then run `actions` in order."""

    requests: list[MPI.Prequest]
    actions: list[Callable[[], object]]


# Persistent requests must be gone before MPI_Finalize, also when nobody closed their reducer.
_open: weakref.WeakSet[Reducer] = weakref.WeakSet()


@atexit.register
def _free_requests_at_exit() -> None:
    for reducer in list(_open):
        reducer._free_requests()


class Reducer:
    """A planned reduction of `buffer` in place over all ranks of `comm`.

    buffer: C-contiguous array that views as [records, operator.width] of operator.dtype. A call folds
    the records of all ranks as `schedule` says; afterwards the buffer holds the result (all of it, or
    this rank's chunk of a scattered schedule). Chunks are cut between groups of `group` records.
    `sent` lists (destination, bytes) of every message of this rank in one step, as they were handed to MPI.
    ``start()`` posts the first round and returns, ``wait()`` does the rest, a call is both. Creating and
    closing are collective; so is a step.

    Raises `ScheduleError` if the schedule is for another number of ranks or is not a correct reduction.
    """

    def __init__(
        self, comm: MPI.Intracomm, schedule: Schedule, operator: Operator, buffer: Any, group: int = 1
    ) -> None:
        if schedule.size != comm.size:
            raise ScheduleError(
                f"{schedule.name}: made for {schedule.size} ranks, the communicator has {comm.size}; "
                f"build it with size={comm.size}"
            )
        self.schedule = schedule
        self._proof = prove(schedule)
        if not buffer.flags.c_contiguous or buffer.dtype != operator.dtype:
            raise ScheduleError(f"{schedule.name}: the buffer must be C-contiguous {operator.dtype}")
        self._records = buffer.reshape(-1, group * operator.width)  # one row is what a chunk never cuts
        self._operator = operator
        self._comm = comm.Dup()
        self.sent: list[tuple[int, int]] = []
        self._steps = list(self._plan())
        self._started = False
        self._closed = False
        _open.add(self)

    @property
    def certificate(self) -> Certificate:
        """What the check proved of the schedule."""
        return self._proof.certificate

    def start(self) -> None:
        """Begin a step: post the first round, then return so that other work can overlap."""
        if self._closed or self._started:
            raise ScheduleError(
                f"{self.schedule.name}: start() on a reducer that is closed or already running"
            )
        self._started = True
        if self._steps:
            MPI.Prequest.Startall(self._steps[0].requests)

    def wait(self) -> None:
        """Finish the step that `start` began; returns once the buffer holds the result."""
        if not self._started:
            raise ScheduleError(f"{self.schedule.name}: wait() without start()")
        for index, step in enumerate(self._steps):
            if index:
                MPI.Prequest.Startall(step.requests)
            MPI.Prequest.Waitall(step.requests)
            for action in step.actions:
                action()
        self._started = False

    def __call__(self) -> None:
        """One whole step."""
        self.start()
        self.wait()

    def close(self) -> None:
        """Free requests and communicator, after a step in flight. Collective; twice does nothing more."""
        if self._closed:
            return
        if self._started:
            self.wait()
        self._free_requests()
        self._comm.Free()
        self._closed = True

    def __enter__(self) -> Reducer:
        return self

    def __exit__(self, *exception: object) -> None:
        # Freeing the communicator is collective: where this rank fails alone, only its requests go.
        if exception[0] is None:
            self.close()
        else:
            self._free_requests()
            self._closed = True

    def _free_requests(self) -> None:
        if self._started:
            return  # messages may be in flight: freeing them now would be an error of its own
        for step in self._steps:
            for request in step.requests:
                request.Free()
        self._steps = []

    # -- planning: everything below runs once ----------------------------------------------------

    def _plan(self) -> Iterator[_PlannedRound]:
        for index, round_ in enumerate(self.schedule.rounds):
            step = self._plan_round(index, round_, self._proof.folds[index].get(self._comm.rank, ()))
            if step.requests:
                yield step

    def _plan_round(self, index: int, round_: Round, folds: tuple[Fold, ...]) -> _PlannedRound:
        """Requests and actions of this rank in one round. Tag = round: a fast neighbour may be ahead."""
        rank, comm = self._comm.rank, self._comm
        mine = [t for t in round_ if rank in (t.src, t.dst) and self._slice(t.chunks) is not None]
        leaving = {chunk for t in mine if t.src == rank for chunk in t.chunks}
        receives: list[MPI.Prequest] = []
        sends: list[MPI.Prequest] = []
        actions: list[Callable[[], object]] = []
        arrivals: dict[int, list[tuple[range, Any]]] = {}
        for t in mine:
            part = self._records[self._slice(t.chunks)]
            if t.src == rank:
                sends.append(comm.Send_init(part, t.dst, index))
                self.sent.append((t.dst, part.nbytes))
                continue
            # A copy may land in place unless the old value is still being sent in this very round.
            direct = not t.merge and leaving.isdisjoint(t.chunks)
            target = part if direct else np.empty_like(part)
            receives.append(comm.Recv_init(target, t.src, index))
            if t.merge:
                arrivals.setdefault(t.src, []).append((t.chunks, target))
            elif not direct:
                actions.append(_copy(part, target))
        for fold in folds:
            actions.extend(self._merges(fold, arrivals))
        return _PlannedRound(receives + sends, actions)

    def _merges(self, fold: Fold, arrivals: Any) -> Iterator[Callable[[], object]]:
        """Pairwise merges, left to right in the stated order; the last one lands in the buffer."""
        where = self._slice(fold.chunks)
        if where is None:
            return
        own = self._records[where]
        values = [
            own if source == self._comm.rank else self._arrived(arrivals[source], fold.chunks)
            for source in fold.sources
        ]
        folded = values[0]
        for value in values[1:]:
            # The merge is commutative to the bit, so the fold may move into the buffer when it meets it.
            into, other = (own, folded) if value is own else (folded, value)
            width = self._operator.width
            yield self._operator.planned_merge(into.reshape(-1, width), other.reshape(-1, width))
            folded = into

    def _arrived(self, messages: list[tuple[range, Any]], chunks: range) -> Any:
        for carried, scratch in messages:
            if carried.start <= chunks.start and chunks.stop <= carried.stop:
                first = self.schedule.chunk_slice(carried, len(self._records)).start
                where = self.schedule.chunk_slice(chunks, len(self._records))
                return scratch[where.start - first : where.stop - first]
        raise ScheduleError(f"{self.schedule.name}: no message of the round carries chunks {chunks}")

    def _slice(self, chunks: range) -> slice | None:
        where = self.schedule.chunk_slice(chunks, len(self._records))
        return where if where.stop > where.start else None


def _copy(into: Any, arrived: Any) -> Callable[[], object]:
    return lambda: np.copyto(into, arrived)
