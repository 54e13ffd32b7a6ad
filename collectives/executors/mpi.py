"""Runs one schedule on one MPI communicator round by round from Python: nothing but messages and merges.

A planned reducer owns a private duplicate of the communicator, room for what it receives, and persistent
requests: a step starts them round by round and allocates nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from mpi4py import MPI

from treeattn.collectives import program
from treeattn.collectives.executors.interpreter import Interpreter
from treeattn.collectives.runtime.mpi_communicator import PersistentRequests
from treeattn.collectives.runtime.reducer import Reducer as BaseReducer
from treeattn.collectives.runtime.reducer import ReductionSpec
from treeattn.collectives.schedule import Schedule


class PlannedRound(NamedTuple):
    """What one rank does in round `number`: start and complete `requests`, then call `actions` in order."""

    number: int
    requests: list[MPI.Prequest]
    actions: list[Callable[[], object]]


class Reducer(BaseReducer):
    """A planned reduction of a buffer in place over all ranks of a communicator.

    Afterwards the buffer holds the result (all of it, or this rank's chunk of a scattered schedule).
    ``start()`` posts the first round and returns, ``test()`` ends rounds whose messages have come and posts
    those that follow, ``wait()`` does the rest. The memory of a GPU needs an MPI library that takes its
    addresses, and is waited for before anything leaves it.

    Raises `ScheduleError` if the schedule is for another number of ranks or is not a correct reduction.
    """

    executor = "mpi"

    def __init__(self, spec: ReductionSpec, schedule: Schedule) -> None:
        planned = program.of_spec(spec, schedule)
        # All ranks are here: what may fail on one of them alone comes after what they do together.
        super().__init__(schedule.name)
        self._requests = PersistentRequests(spec.comm)
        self.certificate, self.sent, self._program = planned.certificate, planned.sent, planned.program
        self._ready = spec.memory.synchronize
        #: What this rank does in a step.
        self.rounds = list(self._planned_rounds(Interpreter(spec, planned)))
        self._at: PlannedRound | None = None
        self._left: list[PlannedRound] = []  # of a step in halves, the next one last
        self.stream_ordered = not self.rounds

    def waits_for(self) -> tuple[str, str]:
        """The round, and its peers."""
        if self._at is None:
            return super().waits_for()
        return f"{self.name}, round {self._at.number}", self._program.peers(self._at.number)

    def _planned_rounds(self, interpreter: Interpreter) -> Iterator[PlannedRound]:
        """Tag = round: a fast neighbour may be ahead."""
        for number, instructions in self._program.by_round():
            requests = self._requests.add(number, *interpreter.messages(instructions))
            yield PlannedRound(number, requests, interpreter.calls(instructions))

    def _begin(self) -> None:
        self._left = self.rounds[::-1]
        self._post()

    def _post(self) -> None:
        """Start the messages of the next round, if there is one."""
        if self._left:
            self._at = self._left[-1]
            self._ready()
            MPI.Prequest.Startall(self._at.requests)

    def _fold(self) -> None:
        """Fold what has come in that round, and post the one that follows."""
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
        """Run the rounds without the two calls that a step in halves takes."""
        for step in self.rounds:
            self._at = step
            self._ready()
            MPI.Prequest.Startall(step.requests)
            MPI.Prequest.Waitall(step.requests)
            for action in step.actions:
                action()

    def _release(self) -> None:
        self._requests.close()

    def _abandon(self) -> None:
        if not self.in_flight:
            self._requests.free()

    _at_exit = _abandon
