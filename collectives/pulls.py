"""What a rank does where ranks read one another's memory: a schedule as a program of copies and pulls.

A rank writes in its own memory alone. In every round it copies what others need then into slots of its own,
announces the round by a number, waits for the numbers of those that it needs something of, and folds or takes
that out of their slots. Where each rank's slots are follows from the schedule, so that nobody has to tell.

A slot is not written again before its readers are done with it, without any barrier: there are two sets of
slots, for even and for odd steps, and who ends a step with a result that counts a rank knows that this rank
began the step, and so ended the one before. Where a rank's result may count nobody
(`Certificate.in_step_from`), the program waits for its readers (`Operation.AWAIT`).

What goes to another node, where nobody can read it, is a message: it leaves out of the sender's own records
and lands in a place of the receiver's own, out of which it folds as if it had been pulled. Messages of a
round cut the program into parts, between the round's announcement and its pulls.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from treeattn.collectives.check import Fold, Proof
from treeattn.collectives.schedule import Schedule, Transfer

__all__ = [
    "LANDED",
    "Exchange",
    "Instruction",
    "Message",
    "Nodes",
    "Operation",
    "Program",
    "Source",
    "plan",
]

#: In the place of a source's rank: what messages from other nodes brought.
LANDED = -1

#: Ranks of each node.
Nodes: TypeAlias = tuple[tuple[int, ...], ...]


class Operation(IntEnum):
    """Of an `Instruction`."""

    COPY = 0  # own records into own slots
    ANNOUNCE = 1  # the number of a round, behind all that was copied
    AWAIT = 2  # the numbers of the sources
    PULL = 3  # the same, then fold what the sources hold, or take what the only one holds


class Source(NamedTuple):
    """A rank, and the record of its set of slots where the records lie; of the own rank, of its records; of
    `LANDED`, of where messages land."""

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


class Message(NamedTuple):
    """To or from a rank of another node: records first .. stop - 1, of the own records what leaves, of where
    messages land what arrives."""

    peer: int
    first: int
    stop: int


class Exchange(NamedTuple):
    """Messages that all travel at once, between instruction `at` and the one before. Those between two ranks
    match in the order in which they are listed on both."""

    at: int
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


class Program(NamedTuple):
    """One rank's instructions, and what cuts them into parts.

    set: records of a set of slots, numbers: that a step counts; on any rank. landing: records of the place
    where messages land, each round's anew.
    """

    instructions: tuple[Instruction, ...]
    set: int
    numbers: int
    exchanges: tuple[Exchange, ...] = ()
    landing: int = 0

    @property
    def parts(self) -> list[range]:
        """Which instructions run before the first exchange, between two, and behind the last."""
        cuts = [0, *(exchange.at for exchange in self.exchanges), len(self.instructions)]
        return [range(first, stop) for first, stop in pairwise(cuts)]


class _Place(NamedTuple):
    """Records first .. stop - 1 as they are in one round: in slots, or where messages land, from record `at`
    on."""

    first: int
    stop: int
    at: int


class _Layout:
    """Where every rank keeps what others pull, round by round."""

    def __init__(self, schedule: Schedule, records: int, group: int, nodes: Nodes) -> None:
        self.schedule, self._records, self._group = schedule, records, group
        self._node = {rank: node for node in nodes for rank in node}
        self._used = [0] * schedule.size
        self.rounds = [self._round(number) for number in range(len(schedule.rounds))]
        self.size = max(self._used)

    def records(self, chunks: range) -> tuple[int, int]:
        """The first record of `chunks` and the one behind the last; chunks are cut between groups."""
        part = self.schedule.chunk_slice(chunks, self._records // self._group)
        return part.start * self._group, part.stop * self._group

    def near(self, transfer: Transfer) -> bool:
        """Whether it stays within a node."""
        return transfer.dst in self._node[transfer.src]

    def transfers(self, number: int) -> Iterator[tuple[Transfer, int, int]]:
        """Of a round, those that carry something: the first record, and the one behind the last."""
        for transfer in self.schedule.rounds[number]:
            first, stop = self.records(transfer.chunks)
            if first < stop:
                yield transfer, first, stop

    def _round(self, number: int) -> dict[int, list[_Place]]:
        leaving: dict[int, set[tuple[int, int]]] = {}
        for transfer, first, stop in self.transfers(number):
            if self.near(transfer):
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


def plan(
    schedule: Schedule, proof: Proof, rank: int, records: int, group: int = 1, nodes: Nodes | None = None
) -> Program:
    """The program of one rank for `records` records, never cut within groups of `group`.

    nodes: ranks that read one another's memory; None: all do.
    """
    layout = _Layout(schedule, records, group, nodes or (tuple(range(schedule.size)),))
    numbers = len(schedule.rounds) + 1
    in_step = records // group >= proof.certificate.in_step_from
    instructions = [] if in_step else _await_readers(layout, rank, records, numbers)
    exchanges, landing = [], 0
    for number in range(len(schedule.rounds)):
        part = _RankRound(layout, proof.folds[number].get(rank, ()), number, rank)
        instructions += part.leaving()
        exchange = Exchange(len(instructions), *part.messages())
        if exchange.sends or exchange.receives:
            exchanges.append(exchange)
        instructions += part.arriving()
        landing = max(landing, part.landing)
    return Program(tuple(instructions), layout.size, numbers, tuple(exchanges), landing)


class _RankRound:
    """What one rank does in one round."""

    def __init__(self, layout: _Layout, folds: tuple[Fold, ...], number: int, rank: int) -> None:
        self._layout, self._folds, self._number, self._rank = layout, folds, number, rank
        transfers = layout.transfers(number)
        self._mine = [(t, first, stop) for t, first, stop in transfers if rank in (t.src, t.dst)]
        self._landed: dict[int, list[_Place]] = {}  # sender -> its records here
        #: Records of the place where messages land.
        self.landing = 0
        for t, first, stop in self._mine:
            if t.dst == rank and not layout.near(t):
                self._landed.setdefault(t.src, []).append(_Place(first, stop, self.landing))
                self.landing += stop - first

    def leaving(self) -> Iterator[Instruction]:
        """Copies of what others of the node pull."""
        places = self._layout.rounds[self._number].get(self._rank, [])
        for place in places:
            yield Instruction(Operation.COPY, self._number + 1, place.first, place.stop, place.at)
        if places:
            yield Instruction(Operation.ANNOUNCE, self._number + 1, places[0].first, places[-1].stop)

    def messages(self) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
        """What is sent to, and received from, other nodes."""
        far = [(t, first, stop) for t, first, stop in self._mine if not self._layout.near(t)]
        sends = (Message(t.dst, first, stop) for t, first, stop in far if t.src == self._rank)
        receives = (
            Message(source, place.at, place.at + place.stop - place.first)
            for source, places in self._landed.items()
            for place in places
        )
        return tuple(sends), tuple(receives)

    def arriving(self) -> Iterator[Instruction]:
        """Copies and folds of what others hold."""
        copies = [(t.chunks, (t.src,)) for t, _, _ in self._mine if t.dst == self._rank and not t.merge]
        for chunks, ranks in (*copies, *self._folds):
            first, stop = self._layout.records(chunks)
            if first < stop:
                sources = tuple(self._source(other, first, stop) for other in ranks)
                yield Instruction(Operation.PULL, self._number + 1, first, stop, sources=sources)

    def _source(self, rank: int, first: int, stop: int) -> Source:
        """Where records first .. stop - 1 of `rank` are."""
        if rank == self._rank:
            return Source(rank, first)
        landed = self._landed.get(rank)
        places = landed or self._layout.rounds[self._number][rank]
        (place,) = (p for p in places if p.first <= first and stop <= p.stop)
        return Source(LANDED if landed else rank, place.at + first - place.first)


def _await_readers(layout: _Layout, rank: int, records: int, numbers: int) -> list[Instruction]:
    """Say that this step begins; wait until those who read from this rank have begun the one before."""
    readers = sorted(
        {
            transfer.dst
            for number in range(len(layout.schedule.rounds))
            for transfer, _, _ in layout.transfers(number)
            if transfer.src == rank and layout.near(transfer)
        }
    )
    everything = 0, records
    begun = Instruction(Operation.ANNOUNCE, 0, *everything)
    sources = tuple(Source(reader, 0) for reader in readers)
    return [begun, Instruction(Operation.AWAIT, -numbers, *everything, sources=sources)]
