"""A program as Python runs it: regions as arrays, copies and folds as calls, round by round.

The messages of a round are persistent requests of MPI, or those that `batch_isend_irecv` starts of a process
group. The memory of a GPU needs an MPI library that takes its addresses; over NCCL it has never run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from treeattn.collectives.executors.lowering import Planned, Regions, messages_over, plan_program
from treeattn.collectives.program import Copy, Fold, Instruction, Region, in_place
from treeattn.collectives.runtime.memory import Memory
from treeattn.collectives.runtime.operator import Operator
from treeattn.collectives.runtime.reducer import Reducer, ReductionSpec
from treeattn.collectives.schedule import Schedule


class Interpreter(Regions):
    """Programs without slots, instruction by instruction: copies and folds as calls."""

    def __init__(self, spec: ReductionSpec, planned: Planned) -> None:
        operator: Operator = spec.operator
        memory: Memory = spec.memory
        self._operator, self._copy = operator, memory.copy
        shape = planned.program.landing, operator.width
        super().__init__(planned.records, memory.empty(shape, planned.records.dtype))

    def calls(self, instructions: Iterable[Instruction]) -> list[Callable[[], object]]:
        """The copies and folds among `instructions` as calls of the memory and of the operator."""
        return [call for instruction in instructions for call in self._calls(instruction)]

    def _calls(self, instruction: Instruction) -> Iterator[Callable[[], object]]:
        if isinstance(instruction, Copy):
            yield partial(self._copy, self.array(instruction.into), self.array(instruction.source))
        elif isinstance(instruction, Fold):
            for into, others in in_place(instruction):
                yield from self._merges(into, others)

    def _merges(self, into: Region, others: tuple[Region, ...]) -> Iterator[Callable[[], object]]:
        """One call where the operator takes several sources that lie in one piece."""
        together = Region(others[0].buffer, others[0].first, sum(other.records for other in others))
        ends = [other.stop for other in others[:-1]]
        if hasattr(self._operator, "planned_merge_many") and ends == [other.first for other in others[1:]]:
            block = self.array(together).reshape(len(others), into.records, -1)
            yield self._operator.planned_merge_many(self.array(into), block)
        else:
            for other in others:
                yield self._operator.planned_merge(self.array(into), self.array(other))


class InterpretedReducer(Reducer):
    """A planned reduction of a buffer in place over all ranks of a communicator, of MPI or of torch.

    Afterwards the buffer holds the result (all of it, or this rank's chunk of a scattered schedule).
    ``start()`` posts the first round and returns, ``test()`` ends rounds whose messages have come and posts
    those that follow, ``wait()`` does the rest. What is queued to the memory of a GPU is waited for before
    anything leaves it.

    Raises `ScheduleError` if the schedule is for another number of ranks or is not a correct reduction.
    """

    def __init__(self, spec: ReductionSpec, schedule: Schedule) -> None:
        planned = plan_program(spec, schedule)
        # All ranks are here: what may fail on one of them alone comes after what they do together.
        super().__init__(schedule.name)
        self.executor = getattr(spec.comm, "library", "mpi")
        self.messages = messages_over(spec.comm, planned.name)
        self.certificate, self.sent, self._program = planned.certificate, planned.sent, planned.program
        memory: Memory = spec.memory
        self._ready = memory.synchronize
        interpreter = Interpreter(spec, planned)
        #: What this rank does in a step: of each round its number and, behind its messages, the calls.
        self.rounds: list[tuple[int, list[Callable[[], object]]]] = []
        for number, instructions in planned.program.by_round:
            self.messages.add(number, *interpreter.messages(instructions))
            self.rounds.append((number, interpreter.calls(instructions)))
        self._at: int | None = None
        self._left = self.rounds[:0]  # the next one last
        self.stream_ordered = self.idle = not self.rounds

    def waits_for(self) -> tuple[str, str]:
        if self._at is None:
            return super().waits_for()
        return f"{self.name}, round {self._at}", self._program.peers(self._at)

    def _begin(self) -> None:
        self._left = self.rounds[::-1]
        self._post()

    def _post(self) -> None:
        """Start the messages of the next round, if there is one."""
        if self._left:
            self._at = self._left[-1][0]
            self._ready()
            self.messages.start(self._at)

    def _fold(self) -> None:
        """Fold what has come in that round, and post the one that follows."""
        for call in self._left.pop()[1]:
            call()
        self._post()

    def _advance(self) -> bool:
        while self._left:
            if not self.messages.test(self._left[-1][0]):
                return False
            self._fold()
        return True

    def _complete(self) -> None:
        while self._left:
            self.messages.wait(self._left[-1][0])
            self._fold()

    def _release(self) -> None:
        self.messages.close()
