"""A schedule planned for one rank and its buffer: what every executor begins with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from treeattn.collectives import program, traffic
from treeattn.collectives.check import Certificate, prove
from treeattn.collectives.program import LANDING, OWN, Copy, Fold, Instruction, Program, Region
from treeattn.collectives.runtime.operator import ManyOperator
from treeattn.collectives.runtime.reducer import ReductionSpec
from treeattn.collectives.schedule import Schedule
from treeattn.errors import ScheduleError

Message: TypeAlias = tuple[Any, int]


class Planned(NamedTuple):
    """The program of one rank, what is proved of it, and what it works on.

    records: [records, width], the rank's own. sent: (destination, bytes) of every message, through shared
    memory too.
    """

    name: str
    certificate: Certificate
    program: Program
    records: Any
    sent: list[tuple[int, int]]


def plan(spec: ReductionSpec, schedule: Schedule, node: Iterable[int] = ()) -> Planned:
    """Plan this rank's program; node: the ranks that read one another's memory.

    Raises `ScheduleError`, before anything is allocated, if the schedule is for another number of ranks or is
    not a correct reduction, or if the buffer does not fit.
    """
    rank, size = spec.comm.rank, spec.comm.size
    if schedule.size != size:
        raise ScheduleError(
            f"{schedule.name}: made for {schedule.size} ranks, the communicator has {size}; "
            f"run it on {schedule.size}, or build one with size={size}"
        )
    proof = prove(schedule)
    if schedule.has_exclusive:
        raise ScheduleError(
            f"{schedule.name} sends what a rank has gathered without its own: such schedules are studied, "
            "not run; take another, such as recursive_doubling"
        )
    records, granularity = spec.records(schedule.name), spec.granularity
    count = len(records)
    bytes_each = records.nbytes // max(count, 1)
    sent = [
        (message.dst, message.records * bytes_each)
        for message in traffic.messages(schedule, count, granularity)
        if message.src == rank
    ]
    made = program.plan(schedule, proof, rank, count, granularity=granularity, node=node)
    return Planned(schedule.name, proof.certificate, made, records, sent)


class Interpreter:
    """Programs without slots, instruction by instruction: regions as arrays, copies and folds as calls."""

    def __init__(self, spec: ReductionSpec, planned: Planned, landing: int | None = None) -> None:
        """landing: records of the landing place, where it is to have more than the program's."""
        self._operator, self._copy = spec.operator, spec.memory.copy
        shape = planned.program.landing if landing is None else landing, spec.operator.width
        self.landing = spec.memory.empty(shape, planned.records.dtype)
        self._buffers = {OWN: planned.records, LANDING: self.landing}

    def array(self, region: Region) -> Any:
        """The records of a region: [records, width]."""
        return self._buffers[region.buffer][region.first : region.stop]

    def messages(self, instructions: Iterable[Instruction]) -> tuple[list[Message], list[Message]]:
        """The messages of a round as (array, peer): what arrives, and what leaves."""
        sends, receives = program.messages(instructions)
        arriving = [(self.array(message.into), message.peer) for message in receives]
        return arriving, [(self.array(message.source), message.peer) for message in sends]

    def calls(self, instructions: Iterable[Instruction]) -> list[Callable[[], object]]:
        """The copies and folds among `instructions` as calls of the memory and of the operator."""
        return [call for instruction in instructions for call in self._calls(instruction)]

    def _calls(self, instruction: Instruction) -> Iterator[Callable[[], object]]:
        if isinstance(instruction, Copy):
            yield partial(self._copy, self.array(instruction.into), self.array(instruction.source))
        elif isinstance(instruction, Fold):
            for into, others in program.in_place(instruction):
                yield from self._merges(into, others)

    def _merges(self, into: Region, others: tuple[Region, ...]) -> Iterator[Callable[[], object]]:
        """One call where the operator takes several sources that lie in one piece."""
        together = Region(others[0].buffer, others[0].first, sum(other.records for other in others))
        ends = [other.stop for other in others[:-1]]
        if isinstance(self._operator, ManyOperator) and ends == [other.first for other in others[1:]]:
            block = self.array(together).reshape(len(others), into.records, -1)
            yield self._operator.planned_merge_many(self.array(into), block)
        else:
            for other in others:
                yield self._operator.planned_merge(self.array(into), self.array(other))
