"""Runs one schedule on one MPI communicator: planned once, then nothing but messages and merges.

A planned reducer owns a private duplicate of the communicator, scratch space for what it receives, and
persistent requests (MPI standard, section 3.9): a step starts them round by round and allocates nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from mpi4py import MPI

from treeattn.collectives.check import Certificate, prove
from treeattn.collectives.executors import persistent, rounds
from treeattn.collectives.memory import HOST, Memory
from treeattn.collectives.operator import Operator
from treeattn.collectives.schedule import Schedule
from treeattn.errors import ScheduleError

__all__ = ["Reducer"]


class _PlannedRound(NamedTuple):
    """What one rank does in one round: start and complete `requests`, then run `actions` in order."""

    requests: list[MPI.Prequest]
    actions: list[Callable[[], object]]


class Reducer:
    """A planned reduction of `buffer` in place over all ranks of `comm`.

    buffer: C-contiguous array that views as [records, operator.width] of operator.dtype. A call folds
    the records of all ranks as `schedule` says; afterwards the buffer holds the result (all of it, or
    this rank's chunk of a scattered schedule). Chunks are cut between groups of `group` records.
    `sent` lists (destination, bytes) of every message of this rank in one step, as they were handed to MPI.
    ``start()`` posts the first round and returns, ``wait()`` does the rest, a call is both. Creating and
    closing are collective; so is a step. `memory`: where the buffer lies; that of a GPU needs an MPI library
    that takes its addresses, and is waited for before anything leaves it.

    Raises `ScheduleError` if the schedule is for another number of ranks or is not a correct reduction.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        schedule: Schedule,
        operator: Operator,
        buffer: Any,
        group: int = 1,
        memory: Memory = HOST,
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
        records = buffer.reshape(-1, group * operator.width)  # one row is what a chunk never cuts
        self._comm = comm.Dup()
        self._ready = memory.synchronize
        planned = rounds.plan(schedule, self._proof, comm.rank, records, operator, memory)
        self.sent: list[tuple[int, int]] = []
        self._steps = [self._requests(round_) for round_ in planned]
        self._started = False
        self._closed = False
        persistent.free_at_exit(self)

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
            self._ready()
            MPI.Prequest.Startall(self._steps[0].requests)

    def wait(self) -> None:
        """Finish the step that `start` began; returns once the buffer holds the result."""
        if not self._started:
            raise ScheduleError(f"{self.schedule.name}: wait() without start()")
        for index, step in enumerate(self._steps):
            if index:
                self._ready()
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
        self.free_requests()
        self._comm.Free()
        self._closed = True

    def __enter__(self) -> Reducer:
        return self

    def __exit__(self, *exception: object) -> None:
        # Freeing the communicator is collective: where this rank fails alone, only its requests go.
        if exception[0] is None:
            self.close()
        else:
            self.free_requests()
            self._closed = True

    def free_requests(self) -> None:
        """Free the requests, unless a step is in flight. Not collective."""
        if self._started:
            return  # messages may be in flight: freeing them now would be an error of its own
        for step in self._steps:
            for request in step.requests:
                request.Free()
        self._steps = []

    def _requests(self, planned: rounds.RankRound) -> _PlannedRound:
        """Tag = round: a fast neighbour may be ahead."""
        comm, tag = self._comm, planned.number
        receives = [comm.Recv_init(array, peer, tag) for array, peer in planned.receives]
        sends = [comm.Send_init(array, peer, tag) for array, peer in planned.sends]
        self.sent += [(peer, array.nbytes) for array, peer in planned.sends]
        return _PlannedRound(receives + sends, planned.actions)
