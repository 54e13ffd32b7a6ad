"""What a rank does where ranks read one another's memory: a schedule as a program of copies and pulls.

A rank writes in its own memory alone. In every round it copies what others need then into slots of its own,
announces the round by a number, waits for the numbers of those that it needs something of, and folds or takes
that out of their slots. Where each rank's slots are follows from the schedule, so that nobody has to tell.

A slot is not written again before its readers are done with it, without any barrier: there are two sets of
slots, for even and for odd steps, and who ends a step with a result that counts a rank knows that this rank
began the step, and so ended the one before. Where a rank's result may count nobody (a scattered one, of fewer
records than ranks), the program waits for its readers (`Operation.AWAIT`).
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

from treeattn.collectives.check import FoldOrders
from treeattn.collectives.schedule import Schedule

__all__ = ["Instruction", "Operation", "Program", "Source", "plan"]


class Operation(IntEnum):
    """Of an `Instruction`."""

    COPY = 0  # own records into own slots
    ANNOUNCE = 1  # the number of a round, behind all that was copied
    AWAIT = 2  # the numbers of the sources
    PULL = 3  # the same, then fold what the sources hold, or take what the only one holds


class Source(NamedTuple):
    """A rank, and the record of its set of slots where the records lie; of the own rank, of its records."""

    rank: int
    place: int


class Instruction(NamedTuple):
    """One thing to do with records first .. stop - 1.

    round: that is announced or waited for, from 1. A step counts `Program.numbers`, so that -numbers is the
    beginning of the step before. place: the record of the own set of slots that a copy begins at. sources: in
    the order in which they fold.
    """

    operation: Operation
    round: int
    first: int
    stop: int
    place: int = 0
    sources: tuple[Source, ...] = ()


class Program(NamedTuple):
    """One rank's instructions. set: records of a set of slots, numbers: that a step counts; on any rank."""

    instructions: tuple[Instruction, ...]
    set: int
    numbers: int


class _Place(NamedTuple):
    """Records first .. stop - 1 as they are in one round, in slots from record `at` on."""

    first: int
    stop: int
    at: int


class _Layout:
    """Where every rank keeps what others pull, round by round."""

    def __init__(self, schedule: Schedule, records: int, group: int) -> None:
        self.schedule, self._records, self._group = schedule, records, group
        self._used = [0] * schedule.size
        self.rounds = [self._round(number) for number in range(len(schedule.rounds))]
        self.size = max(self._used)

    def records(self, chunks: range) -> tuple[int, int]:
        """The first record of `chunks` and the one behind the last; chunks are cut between groups."""
        part = self.schedule.chunk_slice(chunks, self._records // self._group)
        return part.start * self._group, part.stop * self._group

    def _round(self, number: int) -> dict[int, list[_Place]]:
        leaving: dict[int, set[tuple[int, int]]] = {}
        for transfer in self.schedule.rounds[number]:
            first, stop = self.records(transfer.chunks)
            if first < stop:
                leaving.setdefault(transfer.src, set()).add((first, stop))
        return {rank: list(self._places(rank, parts)) for rank, parts in leaving.items()}

    def _places(self, rank: int, parts: set[tuple[int, int]]) -> Iterator[_Place]:
        """A slot for each run of records that leave."""
        runs: list[tuple[int, int]] = []
        for first, stop in sorted(parts):
            if runs and first <= runs[-1][1]:
                runs[-1] = runs[-1][0], max(stop, runs[-1][1])
            else:
                runs.append((first, stop))
        for first, stop in runs:
            yield _Place(first, stop, self._used[rank])
            self._used[rank] += stop - first

    def source(self, number: int, rank: int, first: int, stop: int) -> Source:
        """Where `rank` keeps records first .. stop - 1 in a round."""
        (place,) = (p for p in self.rounds[number][rank] if p.first <= first and stop <= p.stop)
        return Source(rank, place.at + first - place.first)


def plan(schedule: Schedule, folds: FoldOrders, rank: int, records: int, group: int = 1) -> Program:
    """The program of one rank for `records` records, never cut within groups of `group`.

    folds: as `check.prove` gives them.
    """
    layout = _Layout(schedule, records, group)
    numbers = len(schedule.rounds) + 1
    instructions = (
        [] if _all_are_counted(schedule, layout) else _await_readers(layout, rank, records, numbers)
    )
    for number in range(len(schedule.rounds)):
        instructions += _leaving(layout, number, rank)
        instructions += _arriving(schedule, folds, layout, number, rank)
    return Program(tuple(instructions), layout.size, numbers)


def _leaving(layout: _Layout, number: int, rank: int) -> Iterator[Instruction]:
    places = layout.rounds[number].get(rank, [])
    for place in places:
        yield Instruction(Operation.COPY, number + 1, place.first, place.stop, place.at)
    if places:
        yield Instruction(Operation.ANNOUNCE, number + 1, places[0].first, places[-1].stop)


def _arriving(
    schedule: Schedule, folds: FoldOrders, layout: _Layout, number: int, rank: int
) -> Iterator[Instruction]:
    copies = [(t.chunks, (t.src,)) for t in schedule.rounds[number] if t.dst == rank and not t.merge]
    for chunks, ranks in (*copies, *folds[number].get(rank, ())):
        first, stop = layout.records(chunks)
        if first < stop:
            held = (
                Source(rank, first) if other == rank else layout.source(number, other, first, stop)
                for other in ranks
            )
            yield Instruction(Operation.PULL, number + 1, first, stop, sources=tuple(held))


def _all_are_counted(schedule: Schedule, layout: _Layout) -> bool:
    """Whether every rank ends with something that counts every rank."""
    own = (layout.records(range(rank, rank + 1)) for rank in range(schedule.size))
    return schedule.result == "replicated" or all(first < stop for first, stop in own)


def _await_readers(layout: _Layout, rank: int, records: int, numbers: int) -> list[Instruction]:
    """Say that this step begins; wait until those who read from this rank have begun the one before."""
    readers = sorted(
        {
            transfer.dst
            for round_ in layout.schedule.rounds
            for transfer in round_
            if transfer.src == rank and len(range(*layout.records(transfer.chunks)))
        }
    )
    everything = 0, records
    begun = Instruction(Operation.ANNOUNCE, 0, *everything)
    sources = tuple(Source(reader, 0) for reader in readers)
    return [begun, Instruction(Operation.AWAIT, -numbers, *everything, sources=sources)]
