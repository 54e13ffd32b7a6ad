"""One rank's part of a schedule as a program over symbolic buffers, from which every executor is lowered.

Buffers are a rank's own records, the slots of every rank of its node (memory that all of them read and only
their owner writes), and a landing place for messages. Where everything lies follows from the schedule alone:
no exchange is needed. In each round a rank starts its messages, copies what others of its node need into its
slots and publishes the round; awaits its messages and the rounds that others published; then copies and folds
what came into its own records. Landing places of a round are used again in the next.

Slots are overwritten without a barrier: there are two sets, for even and for odd steps, and a rank that ends
a step with a result that depends on another rank knows that this rank began the step, and so was done with
the one before. With fewer records than `Certificate.min_records_for_double_buffering` that is not so, and the
program begins by awaiting its readers.

One program of sends, receives, copies and reductions for each rank is the idea of MSCCLang (Cowan et al.,
ASPLOS 2023).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple, TypeAlias

from treeattn.collectives.check import FoldOrder, Proof
from treeattn.collectives.schedule import Round, Schedule, Transfer

#: Buffers other than the slots of ranks, which go by the number of their rank.
OWN, LANDING = -1, -2


class Region(NamedTuple):
    """Neighbouring records of a buffer, from record `first` on."""

    buffer: int
    first: int
    records: int

    @property
    def stop(self) -> int:
        """The record behind the last."""
        return self.first + self.records


class Send(NamedTuple):
    """Starts a message. Those of one round between two ranks match in the order in which both list them."""

    round: int
    peer: int
    source: Region


class Recv(NamedTuple):
    """Starts the reception of a message, into own records or where messages land."""

    round: int
    peer: int
    into: Region


class Publish(NamedTuple):
    """Announces the round to the ranks of the node, behind all that was copied into slots before."""

    round: int
    readers: tuple[int, ...]
    piece: int = 0


class Await(NamedTuple):
    """Waits for the messages of the round, and until `ranks` have published it `steps_ago`."""

    round: int
    ranks: tuple[int, ...]
    steps_ago: int = 0
    piece: int = 0


class Copy(NamedTuple):
    """Overwrites `into` with `source`."""

    round: int
    into: Region
    source: Region


class Fold(NamedTuple):
    """Overwrites `into`, one of the sources, with all sources merged left to right."""

    round: int
    into: Region
    sources: tuple[Region, ...]


Instruction: TypeAlias = Send | Recv | Publish | Await | Copy | Fold


@dataclass(frozen=True)
class Program:
    """The instructions of one rank, in order; rounds count from 1, and 0 is the beginning of the step.

    rounds: of the schedule. slots: records of a set of slots, the same on all ranks of a node. landing:
    records of the place where messages land. pieces: each is published by itself.
    """

    rank: int
    instructions: tuple[Instruction, ...]
    rounds: int
    slots: int
    landing: int
    pieces: int = 1

    @functools.cached_property
    def by_round(self) -> tuple[tuple[int, list[Instruction]], ...]:
        """The rounds in which this rank has something to do, and its instructions there; found once for all
        plans of this program."""
        grouped = groupby(self.instructions, key=lambda instruction: instruction.round)
        return tuple((number, list(instructions)) for number, instructions in grouped)

    @property
    def exchanges(self) -> list[list[Send | Recv]]:
        """The messages of each round that has some: they travel at once, and have come when it is awaited."""
        found = ([i for i in listed if isinstance(i, Send | Recv)] for _, listed in self.by_round)
        return [messages for messages in found if messages]

    @property
    def message_peers(self) -> set[int]:
        """The ranks that messages leave for or come from."""
        return {i.peer for i in self.instructions if isinstance(i, Send | Recv)}

    def sources(self, number: int) -> set[int]:
        """The ranks that a round awaits something of."""
        at = [i for i in self.instructions if i.round == number]
        publishers = (rank for i in at if isinstance(i, Await) for rank in i.ranks)
        return {i.peer for i in at if isinstance(i, Recv)}.union(publishers)

    def readers(self, number: int) -> set[int]:
        """The ranks that take something of this one in a round."""
        at = [i for i in self.instructions if i.round == number]
        readers = (rank for i in at if isinstance(i, Publish) for rank in i.readers)
        return {i.peer for i in at if isinstance(i, Send)}.union(readers)

    def peers(self, number: int) -> str:
        """Both of a round, in words."""
        if number == 0:
            return f"{ranks(self.sources(0))} to be done with the last step but one"
        named = (("messages from", self.sources(number)), ("reception by", self.readers(number)))
        return " and ".join(f"{what} {ranks(of)}" for what, of in named if of)


def ranks(numbers: Iterable[int]) -> str:
    """Ranks in words: ``rank 1 and 3``."""
    return f"rank {' and '.join(map(str, sorted(numbers)))}"


@functools.lru_cache(maxsize=1024)
def in_place(fold: Fold) -> tuple[tuple[Region, tuple[Region, ...]], ...]:
    """The fold as merges in place: into what, and what merges into it, in order.

    What folds before the own records folds into the first of these sources: the merge is commutative to the
    bit. Where all of them are messages, `plan` lets each of the results lie in one piece.
    """
    own = fold.sources.index(fold.into)
    before, after = fold.sources[:own], fold.sources[own + 1 :]
    first = [(before[0], before[1:])] if len(before) > 1 else []
    return (*first, (fold.into, (*before[:1], *after)))


def plan(
    schedule: Schedule,
    proof: Proof,
    rank: int,
    records: int,
    *,
    granularity: int = 1,
    node: Iterable[int] = (),
    pieces: int = 1,
) -> Program:
    """The program of `rank` for `records` records, with chunks cut at multiples of `granularity`.

    node: the ranks, this one among them, that read one another's memory; others are reached by messages.
    pieces: so many at most, where ranks of one node pass all records one way in each round, as in trees:
    while a rank folds a piece, another one writes the next. Where ranks swap, none would wait less.
    """
    node, rows = frozenset(node), records // granularity
    pieces = max(min(pieces, rows), 1) if len(node) == schedule.size and _one_way(schedule) else 1
    planner = _Planner(schedule, rank, granularity, node)
    rounds = list(enumerate(zip(schedule.rounds, proof.folds, strict=True), 1))
    planned = []
    for piece in range(pieces):
        planner.piece, planner.rows = piece, range(rows * piece // pieces, rows * (piece + 1) // pieces)
        planned.append([i for number, given in rounds for i in planner.round(number, *given)])
    instructions = _in_turn(planned)
    least = proof.certificate.min_records_for_double_buffering
    if least is None or records // granularity < least:
        instructions = [*planner.await_readers(), *instructions]
    slots = max(planner.used.values(), default=0)
    return Program(rank, tuple(instructions), len(schedule.rounds), slots, planner.landing, pieces)


def _one_way(schedule: Schedule) -> bool:
    ends = (({t.src for t in round_}, {t.dst for t in round_}) for round_ in schedule.rounds)
    return schedule.chunks == 1 and all(senders.isdisjoint(receivers) for senders, receivers in ends)


def _in_turn(pieces: list[list[Instruction]]) -> list[Instruction]:
    """Each piece goes on until it waits, then the next: pieces are alike but for their records. Ranks never
    wait for one another in a ring: each takes waits in the order of (length of the chain before it, piece).
    """
    waits = [0, *(at for at, i in enumerate(pieces[0]) if isinstance(i, Await)), len(pieces[0])]
    return [i for first, stop in pairwise(waits) for piece in pieces for i in piece[first:stop]]


class _SlotRun(NamedTuple):
    """Records first .. stop - 1, which leave a rank in one round, in its slots from `at` on."""

    first: int
    stop: int
    at: int


#: (sender, chunks) -> where that message arrives; rank -> what its slots hold: both of one round.
_Landed: TypeAlias = dict[tuple[int, range], Region]
_Slots: TypeAlias = dict[int, list[_SlotRun]]


class _Planner:
    """The rounds of one rank, one after the other, and the room that they need."""

    #: What is planned now: which piece, and its records as multiples of the granularity.
    piece, rows = 0, range(0)

    def __init__(self, schedule: Schedule, rank: int, granularity: int, node: frozenset[int]) -> None:
        self._schedule, self._rank, self._node = schedule, rank, node
        self._granularity = granularity
        #: Records of a set of slots of each rank of the node, and of the landing place.
        self.used, self.landing = dict.fromkeys(node, 0), 0
        self._readers: set[int] = set()
        self._writers: set[int] = set()

    def round(
        self, number: int, round_: Round, folds: dict[int, tuple[FoldOrder, ...]]
    ) -> Iterator[Instruction]:
        """The instructions of one round; folds: of each rank."""
        rank = self._rank
        moved = [t for t in round_ if self._rank in (t.src, t.dst) or self._near(t)]
        moved = [t for t in moved if self._own(t.chunks).records]
        near = [t for t in moved if self._near(t)]
        far = [t for t in moved if not self._near(t)]
        slots, landed = self._allot_slots(near), self._land(moved, folds.get(rank, ()))
        for t in far:
            if t.src == rank:
                yield Send(number, t.dst, self._own(t.chunks))
            else:
                yield Recv(number, t.src, landed[t.src, t.chunks])
        for first, stop, at in slots.get(rank, ()):
            source = Region(OWN, first, stop - first)
            yield Copy(number, source._replace(buffer=rank, first=at), source)
        readers, writers = {t.dst for t in near if t.src == rank}, {t.src for t in near if t.dst == rank}
        if readers:
            yield Publish(number, tuple(sorted(readers)), self.piece)
        if far or writers:
            yield Await(number, tuple(sorted(writers)), piece=self.piece)
        self._readers |= readers
        self._writers |= writers
        for t in moved:
            if t.dst == rank and not t.merge:
                source = self._source(t.src, t.chunks, landed, slots)
                if source.buffer != OWN:
                    yield Copy(number, self._own(t.chunks), source)
        for fold in folds.get(rank, ()):
            into = self._own(fold.chunks)
            if into.records:
                sources = (self._source(source, fold.chunks, landed, slots) for source in fold.sources)
                yield Fold(number, into, tuple(sources))

    def await_readers(self) -> Iterator[Instruction]:
        """Announce this step to the ranks that this one reads from; await the last one of its readers."""
        if self._writers:
            yield Publish(0, tuple(sorted(self._writers)))
        if self._readers:
            yield Await(0, tuple(sorted(self._readers)), steps_ago=1)

    def _near(self, t: Transfer) -> bool:
        return t.src in self._node and t.dst in self._node

    def _own(self, chunks: range) -> Region:
        part = self.rows[self._schedule.chunk_slice(chunks, len(self.rows))]
        return Region(OWN, part.start * self._granularity, len(part) * self._granularity)

    def _allot_slots(self, near: list[Transfer]) -> _Slots:
        """Room for what ranks of the node read from one another: each record that leaves a rank once."""
        leaving: dict[int, set[Region]] = {}
        for t in near:
            leaving.setdefault(t.src, set()).add(self._own(t.chunks))
        slots = {}
        for rank, regions in leaving.items():
            slots[rank] = runs = _runs(sorted(regions), self.used[rank])
            self.used[rank] = runs[-1].at + runs[-1].stop - runs[-1].first
        return slots

    def _land(self, moved: list[Transfer], folds: tuple[FoldOrder, ...]) -> _Landed:
        """Where each message arrives: a copy in its place, unless records there leave in this very round;
        what is folded side by side, in the order of `in_place`."""
        arriving = {(t.src, t.chunks): t for t in moved if t.dst == self._rank and not self._near(t)}
        leaving = {chunk for t in moved if t.src == self._rank for chunk in t.chunks}
        landed, at = {}, 0
        folded = [(source, fold.chunks) for fold in folds for source in _others(fold, self._rank)]
        for key in dict.fromkeys([*(key for key in folded if key in arriving), *arriving]):
            landed[key] = own = self._own(key[1])
            if arriving[key].merge or not leaving.isdisjoint(key[1]):
                landed[key] = Region(LANDING, at, own.records)
                at += own.records
        self.landing = max(self.landing, at)
        return landed

    def _source(self, rank: int, chunks: range, landed: _Landed, slots: _Slots) -> Region:
        """Where the records of `chunks` of a rank are, perhaps among others."""
        own = self._own(chunks)
        if rank == self._rank:
            return own
        if rank in self._node:
            run = next(run for run in slots[rank] if run.first <= own.first and own.stop <= run.stop)
            return Region(rank, run.at + own.first - run.first, own.records)
        carried, region = next(
            (carried, region)
            for (sender, carried), region in landed.items()
            if sender == rank and carried.start <= chunks.start and chunks.stop <= carried.stop
        )
        return Region(region.buffer, region.first + own.first - self._own(carried).first, own.records)


def _runs(regions: list[Region], at: int) -> list[_SlotRun]:
    """Regions, ascending, as runs without gaps that lie one behind the other from `at` on."""
    runs: list[_SlotRun] = []
    for _, first, records in regions:
        if runs and first <= runs[-1].stop:
            runs[-1] = runs[-1]._replace(stop=max(runs[-1].stop, first + records))
        else:
            at += runs[-1].stop - runs[-1].first if runs else 0
            runs.append(_SlotRun(first, first + records, at))
    return runs


def _others(fold: FoldOrder, rank: int) -> list[int]:
    """The other sources in the order in which they land: v1 v2 v0 | v4 v5 around the own value v3."""
    own = fold.sources.index(rank)
    return [*fold.sources[1:own], *fold.sources[: min(own, 1)], *fold.sources[own + 1 :]]
