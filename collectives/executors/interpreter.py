"""A program as Python runs it: regions as arrays, copies and folds as calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeAlias

from treeattn.collectives import program
from treeattn.collectives.program import LANDING, OWN, Copy, Fold, Instruction, Planned, Region
from treeattn.collectives.runtime.operator import ManyOperator
from treeattn.collectives.runtime.reducer import ReductionSpec

__all__ = ["Interpreter"]

Message: TypeAlias = tuple[Any, int]


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
