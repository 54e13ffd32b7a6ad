"""What one rank does in each round of a schedule: the part that every executor over real ranks shares.

Planned once over buffers that never move: messages that leave and arrive, and the merges and copies that
follow them. Several arrivals that fold into the same records lie side by side, in the order in which they
fold, so that an operator that can takes them all in one go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from treeattn.collectives.check import Certificate, Fold, Proof, prove
from treeattn.collectives.operator import ManyOperator
from treeattn.collectives.reducer import Reduction
from treeattn.collectives.schedule import Round, Schedule, Transfer
from treeattn.errors import ScheduleError

__all__ = [
    "Action",
    "Copy",
    "Merge",
    "MergeMany",
    "Message",
    "RankRound",
    "calls",
    "peers",
    "plan",
    "proved",
    "sent",
]


class Message(NamedTuple):
    """The records of `chunks` that leave for, or arrive from, the rank `peer`."""

    array: Any
    peer: int
    chunks: range


class Copy(NamedTuple):
    """`into` becomes what `source` holds."""

    into: Any
    source: Any


class Merge(NamedTuple):
    """`other` folds into `into`, both [records, width]."""

    into: Any
    other: Any


class MergeMany(NamedTuple):
    """`others` [count, records, width] fold into `into`, the first of them first."""

    into: Any
    others: Any


Action: TypeAlias = Copy | Merge | MergeMany


class RankRound(NamedTuple):
    """One rank's part of round `number`, from 0: all messages at once, then `actions` in order.

    Messages between two ranks match in the order in which they are listed on both.
    """

    number: int
    receives: list[Message]
    sends: list[Message]
    actions: list[Action]


def proved(reduction: Reduction, schedule: Schedule) -> Proof:
    """What is proved of a schedule that is to run over these ranks. Raises `ScheduleError` as `plan` does."""
    size = reduction.comm.size
    if schedule.size != size:
        raise ScheduleError(
            f"{schedule.name}: made for {schedule.size} ranks, the communicator has {size}; "
            f"run it on {schedule.size}, or build one with size={size}"
        )
    proof = prove(schedule)
    if schedule.keeps_apart:
        raise ScheduleError(
            f"{schedule.name} sends what a rank has gathered without its own: such schedules are studied, "
            "not run; take another, such as recursive_doubling"
        )
    return proof


def plan(reduction: Reduction, schedule: Schedule) -> tuple[Certificate, Iterator[RankRound]]:
    """What is proved of the schedule, and the rounds in which this rank sends or receives something.

    Raises `ScheduleError`, before anything is allocated, if the schedule is for another number of ranks or is
    not a correct reduction, or if the buffer does not fit.
    """
    proof = proved(reduction, schedule)
    planner = _Planner(reduction, schedule)
    folds = (of_round.get(reduction.comm.rank, ()) for of_round in proof.folds)
    planned = map(planner.round, range(len(schedule.rounds)), schedule.rounds, folds)
    return proof.certificate, (part for part in planned if part.receives or part.sends)


def calls(reduction: Reduction, actions: list[Action]) -> list[Callable[[], object]]:
    """Each action as a call of the operator or of the memory."""
    return [_call(reduction, action) for action in actions]


def _call(reduction: Reduction, action: Action) -> Callable[[], object]:
    if isinstance(action, Copy):
        return partial(reduction.memory.copy, *action)
    planned: Callable[[], object]
    if isinstance(action, Merge):
        planned = reduction.operator.planned_merge(*action)
    else:
        planned = reduction.operator.planned_merge_many(*action)
    return planned


def sent(rounds: list[RankRound]) -> list[tuple[int, int]]:
    """(destination, bytes) of every message that leaves this rank."""
    return [(message.peer, message.array.nbytes) for round_ in rounds for message in round_.sends]


def peers(round_: RankRound) -> str:
    """Whom a rank waits for in a round, in words: who sends to it, and who takes what it sends."""
    ways = (("messages from", round_.receives), ("reception by", round_.sends))
    named = [(what, sorted({message.peer for message in messages})) for what, messages in ways]
    return " and ".join(f"{what} rank {' and '.join(map(str, of))}" for what, of in named if of)


class _Landing(NamedTuple):
    """Where messages land that will be merged: (src, chunks) -> scratch, and chunks -> the block of a fold
    whose messages carry nothing else, in the order of `_Planner._order`."""

    messages: dict[tuple[int, range], Any]
    blocks: dict[range, Any]


class _Planner:
    def __init__(self, reduction: Reduction, schedule: Schedule) -> None:
        self._schedule = schedule
        self._rank = reduction.comm.rank
        self._operator, self._memory = reduction.operator, reduction.memory
        records = reduction.records(schedule.name)
        # One row is what a chunk never cuts.
        self._records = records.reshape(-1, reduction.group * reduction.operator.width)

    def round(self, index: int, round_: Round, folds: tuple[Fold, ...]) -> RankRound:
        rank = self._rank
        mine = [t for t in round_ if rank in (t.src, t.dst) and self._slice(t.chunks) is not None]
        leaving = {chunk for t in mine if t.src == rank for chunk in t.chunks}
        planned = RankRound(index, [], [], [])
        landing = self._landing([t for t in mine if t.dst == rank and t.merge], folds)
        for t in mine:
            part = self._records[self._slice(t.chunks)]
            if t.src == rank:
                planned.sends.append(Message(part, t.dst, t.chunks))
            elif t.merge:
                planned.receives.append(Message(landing.messages[t.src, t.chunks], t.src, t.chunks))
            elif leaving.isdisjoint(t.chunks):
                planned.receives.append(Message(part, t.src, t.chunks))
            else:  # a copy must not land where the old value is still being sent in this very round
                scratch = self._memory.empty(part.shape, part.dtype)
                planned.receives.append(Message(scratch, t.src, t.chunks))
                planned.actions.append(Copy(part, scratch))
        for fold in folds:
            planned.actions.extend(self._merges(fold, landing))
        return planned

    def _landing(self, merged: list[Transfer], folds: tuple[Fold, ...]) -> _Landing:
        """Room for the messages that will be merged."""
        landing = _Landing({}, {})
        carried = {(t.src, t.chunks) for t in merged}
        for fold in folds:
            keys = [(source, fold.chunks) for source in self._order(fold)]
            if self._slice(fold.chunks) is not None and carried.issuperset(keys):
                block = landing.blocks[fold.chunks] = self._scratch(fold.chunks, len(keys))
                landing.messages.update((key, block[i]) for i, key in enumerate(keys))
        for t in merged:
            if (t.src, t.chunks) not in landing.messages:
                landing.messages[t.src, t.chunks] = self._scratch(t.chunks, 1)[0]
        return landing

    def _scratch(self, chunks: range, count: int) -> Any:
        part = self._records[self._slice(chunks)]
        return self._memory.empty((count, *part.shape), part.dtype)

    def _order(self, fold: Fold) -> list[int]:
        """The other sources as they lie in a block. What folds before the own value folds into the first
        of them, which therefore stands last of these, beside what folds after: v1 v2 v0 | v4 v5."""
        own = fold.sources.index(self._rank)
        return [*fold.sources[1:own], *fold.sources[: min(own, 1)], *fold.sources[own + 1 :]]

    def _merges(self, fold: Fold, landing: _Landing) -> Iterator[Action]:
        """The fold, left to right in the stated order; the result is in the buffer.

        The merge is commutative to the bit, so what folds before the own value may then fold into it.
        """
        where = self._slice(fold.chunks)
        if where is None:
            return
        width = self._operator.width
        own, before = self._records[where].reshape(-1, width), fold.sources.index(self._rank)
        if fold.chunks in landing.blocks and isinstance(self._operator, ManyOperator):
            block = landing.blocks[fold.chunks].reshape(len(fold.sources) - 1, -1, width)
            first = max(before - 1, 0)
            if first:
                yield MergeMany(block[first], block[:first])
            yield MergeMany(own, block[first:])
            return
        others = [self._arrived(landing, s, fold.chunks) for s in fold.sources if s != self._rank]
        for other in others[1:before]:
            yield Merge(others[0], other)
        for other in others[:1] * bool(before) + others[before:]:
            yield Merge(own, other)

    def _arrived(self, landing: _Landing, source: int, chunks: range) -> Any:
        """The records of `chunks` in the message from `source` that carries them, perhaps among others."""
        for (sender, carried), array in landing.messages.items():
            if sender == source and carried.start <= chunks.start and chunks.stop <= carried.stop:
                first = self._schedule.chunk_slice(carried, len(self._records)).start
                where = self._schedule.chunk_slice(chunks, len(self._records))
                return array[where.start - first : where.stop - first].reshape(-1, self._operator.width)
        raise ScheduleError(f"{self._schedule.name}: no message of the round carries chunks {chunks}")

    def _slice(self, chunks: range) -> slice | None:
        where = self._schedule.chunk_slice(chunks, len(self._records))
        return where if where.stop > where.start else None
