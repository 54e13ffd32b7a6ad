"""Runs one schedule on one MPI communicator: planned once, then nothing but messages and merges.

A planned reducer owns a private duplicate of the communicator, scratch space for what it receives, and
persistent requests (MPI standard, section 3.9): a step starts them round by round and allocates nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from mpi4py import MPI

from treeattn.collectives.executors import rounds
from treeattn.collectives.executors.persistent import PersistentReducer
from treeattn.collectives.reducer import Reduction
from treeattn.collectives.schedule import Schedule

__all__ = ["Reducer"]


class _PlannedRound(NamedTuple):
    """What one rank does in one round: start and complete `requests`, then run `actions` in order."""

    requests: list[MPI.Prequest]
    actions: list[Callable[[], object]]
    planned: rounds.RankRound


class Reducer(PersistentReducer):
    """A planned reduction of a buffer in place over all ranks of a communicator.

    Afterwards the buffer holds the result (all of it, or this rank's chunk of a scattered schedule).
    ``start()`` posts the first round and returns, ``test()`` ends rounds whose messages have come and posts
    those that follow, ``wait()`` does the rest. The memory of a GPU needs an MPI library that takes its
    addresses, and is waited for before anything leaves it.

    Raises `ScheduleError` if the schedule is for another number of ranks or is not a correct reduction.
    """

    executor = "mpi"

    def __init__(self, reduction: Reduction, schedule: Schedule) -> None:
        self.certificate, lazily = rounds.plan(reduction, schedule)
        # All ranks are here: what may fail on one of them alone comes after what they do together.
        super().__init__(schedule.name, reduction)
        planned = list(lazily)
        self.sent = rounds.sent(planned)
        self._ready = reduction.memory.synchronize
        self._steps = [self._plan(reduction, round_) for round_ in planned]
        self._at: _PlannedRound | None = None
        self._left: list[_PlannedRound] = []  # of a step in halves, the next one last
        self.queued = not planned

    def waits_for(self) -> tuple[str, str]:
        """The round, and its peers."""
        if self._at is None:
            return super().waits_for()
        return f"{self.name}, round {self._at.planned.number + 1}", rounds.peers(self._at.planned)

    def _plan(self, reduction: Reduction, planned: rounds.RankRound) -> _PlannedRound:
        """Tag = round: a fast neighbour may be ahead."""
        comm, tag = self._comm, planned.number
        requests = [comm.Recv_init(array, peer, tag) for array, peer, _ in planned.receives]
        requests += [comm.Send_init(array, peer, tag) for array, peer, _ in planned.sends]
        self._requests += requests
        return _PlannedRound(requests, rounds.calls(reduction, planned.actions), planned)

    def _begin(self) -> None:
        self._left = self._steps[::-1]
        self._post()

    def _post(self) -> None:
        """The messages of the round that is next, if there is one."""
        if self._left:
            self._at = self._left[-1]
            self._ready()
            MPI.Prequest.Startall(self._at.requests)

    def _fold(self) -> None:
        """What has come in that round, and post the one that follows."""
        for action in self._left.pop().actions:
            action()
        self._post()

    def _advance(self) -> bool:
        while self._left:
            if not MPI.Prequest.Testall(self._left[-1].requests):
                return False
            self._fold()
        return True

    def _complete(self) -> None:
        while self._left:
            MPI.Prequest.Waitall(self._left[-1].requests)
            self._fold()

    def _step(self) -> None:
        """Without the two calls that a step in halves takes."""
        for step in self._steps:
            self._at = step
            self._ready()
            MPI.Prequest.Startall(step.requests)
            MPI.Prequest.Waitall(step.requests)
            for action in step.actions:
                action()
