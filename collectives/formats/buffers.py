"""Programs over the buffers of all ranks, followed chunk by chunk and turned into a `Schedule`.

A program is a list of operations, each of which writes sums of cells to cells. A message is a cell that is
written from a cell of another rank. A cell that two operations use without an order, one of them writing, is
a race and refused, as is a sum of unlike chunks, a message that is added twice, a result that is not there.

What a rank holds of a chunk goes through versions: its own contribution is version 0, and each time it takes
in what has reached it there is the next. A message carries one version. In a `Schedule` all transfers of a
round read what stood when it began, so a message comes after the round that made its version, and not after
the round that makes the next.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple, NoReturn, TypeAlias

from treeattn.collectives.combinators import runs_of
from treeattn.collectives.schedule import Round, Schedule, Transfer
from treeattn.errors import ScheduleError

#: The order keeps a bit for each pair of operations: 128 MB at the limit.
OPERATION_LIMIT = 1 << 15


class Cell(NamedTuple):
    """One chunk's room in a buffer of a rank."""

    rank: int
    buffer: str
    at: int

    def __str__(self) -> str:
        return f"{self.buffer}[{self.at}] of rank {self.rank}"


class _Held(NamedTuple):
    """What a rank holds of a chunk, in one of its versions."""

    chunk: int
    version: int


@dataclass(eq=False)
class _Message:
    """One chunk of one message; those of one `sender`, an operation, become one transfer. taken: what its
    receiver then held; merge: None until it is taken."""

    src: int
    dst: int
    chunk: int
    sender: int
    merge: bool | None = None
    taken: _Held | None = None
    round: int = 0
    later: list[tuple[_Message, int]] = field(default_factory=list)  # who comes at least so many rounds after


_Content: TypeAlias = "_Held | _Message"


@dataclass
class Operation:
    """`writes`: for each cell, in order, the cells whose sum goes there. `after`: what it waits for."""

    rank: int
    named: str
    after: list[int] = field(default_factory=list)
    writes: list[tuple[Cell, tuple[Cell, ...]]] = field(default_factory=list)


class BufferProgram:
    """Operations over buffers i (input, the chunks of the records), o (output; i where `in_place`) and s.

    wanted: a schedule without rounds: of the name, ranks, chunks and result of the one that is to be made.
    """

    def __init__(self, operations: Sequence[Operation], wanted: Schedule, in_place: bool) -> None:
        self._operations = list(operations)
        for rank in range(wanted.size):
            every = [n for n, operation in enumerate(operations) if operation.rank == rank]
            self._operations.append(Operation(rank, f"the end of rank {rank}", every))
        self._wanted, self._in_place = wanted, in_place
        self._contents: dict[Cell, _Content] = {}
        self._written: dict[Cell, int] = {}
        self._read: defaultdict[Cell, list[int]] = defaultdict(list)
        self._messages: list[_Message] = []
        #: Of each version of a rank's chunk the messages that made it, and of (rank, chunk, version) those
        #: that carry it.
        self._made: defaultdict[tuple[int, int], list[list[_Message]]] = defaultdict(lambda: [[]])
        self._carried: defaultdict[tuple[int, int, int], list[_Message]] = defaultdict(list)
        self._now = 0

    def schedule(self) -> Schedule:
        """The schedule that sends the same messages. Raises `ScheduleError`."""
        for number in self._in_order():
            self._now = number
            for target, sources in self._operations[self._now].writes:
                self._write(target, sources)
        size = self._wanted.size
        for rank in range(size):
            self._now = len(self._operations) - size + rank
            for chunk in self._wanted.promised(rank):
                own_room = self._wanted.result == "scattered" and not self._in_place
                cell = Cell(rank, "i" if self._in_place else "o", 0 if own_room else chunk)
                if self._settled(self._content(cell)) != (chunk, self._newest(rank, chunk)):
                    self._refuse(f"lacks the result of chunk {chunk} in {cell}")
        return replace(self._wanted, rounds=self._rounds())

    def _in_order(self) -> list[int]:
        """The operations, each behind those that it waits for."""
        if len(self._operations) > OPERATION_LIMIT:
            raise ScheduleError(f"{len(self._operations)} operations, the limit is {OPERATION_LIMIT}")
        after = {number: operation.after for number, operation in enumerate(self._operations)}
        try:
            order = list(TopologicalSorter(after).static_order())
        except CycleError as error:
            cycle = ", ".join(self._operations[number].named for number in error.args[1][1:4])
            raise ScheduleError(f"deadlock: {cycle} wait for each other") from None
        self._before = [0] * len(order)  # a bit for each operation that is always done when this one begins
        for number in order:
            for earlier in after[number]:
                self._before[number] |= self._before[earlier] | 1 << earlier
        return order

    def _write(self, target: Cell, sources: tuple[Cell, ...]) -> None:
        rank = self._operations[self._now].rank
        contents = [self._content(source) for source in sources]
        content = contents[0] if len(contents) == 1 else self._sum(rank, contents)
        if target.rank != rank:
            held = self._settled(content)
            content = _Message(rank, target.rank, held.chunk, self._now)
            self._messages.append(content)
            self._carried[rank, held.chunk, held.version].append(content)
        for other in (*self._read.pop(target, ()), self._written.get(target, self._now)):
            self._check_order(other, target)
        self._written[target] = self._now
        self._contents[target] = content

    def _sum(self, rank: int, contents: list[_Content]) -> _Held:
        """Merge all messages into what the rank holds; without that, the first message takes its place."""
        held = [content for content in contents if isinstance(content, _Held)]
        arrived = [content for content in contents if isinstance(content, _Message)]
        if not held:
            held = [self._settled(arrived.pop(0))]
        base = held[0]
        if len(held) > 1 or len({base.chunk, *(message.chunk for message in arrived)}) > 1:
            self._refuse("adds what is no other rank's part of the same chunk")
        if base.version != self._newest(rank, base.chunk):
            self._refuse(f"adds to chunk {base.chunk} as it was before other ranks' parts were added")
        return self._take(arrived, merge=True)

    def _content(self, cell: Cell) -> _Content:
        if cell in self._written:
            self._check_order(self._written[cell], cell)
        self._read[cell].append(self._now)
        content = self._contents.get(cell)
        if content is None:
            if cell.buffer != "i" or cell.at >= self._wanted.chunks:
                self._refuse(f"reads {cell}, where nothing is yet")
            return _Held(cell.at, 0)
        if isinstance(content, _Message) and content.merge:
            self._refuse(f"uses what reached {cell} after it was added already")
        return content if isinstance(content, _Held) else content.taken or content

    def _settled(self, content: _Content) -> _Held:
        """A message that is passed on, or the result, takes the place of what its receiver held."""
        if isinstance(content, _Held):
            return content
        return self._take([content], merge=False)

    def _newest(self, rank: int, chunk: int) -> int:
        """The newest version that `rank` has of `chunk`."""
        return len(self._made[rank, chunk]) - 1

    def _take(self, messages: list[_Message], merge: bool) -> _Held:
        """Their receiver merges them all into what it holds, or one takes its place: the new version."""
        rank, chunk = messages[0].dst, messages[0].chunk
        self._made[rank, chunk].append(messages)
        held = _Held(chunk, self._newest(rank, chunk))
        for message in messages:
            message.merge, message.taken = merge, held
        return held

    def _check_order(self, other: int, cell: Cell) -> None:
        if other != self._now and not self._before[self._now] >> other & 1:
            self._refuse(f"uses {cell} without waiting for {self._operations[other].named}")

    def _refuse(self, what: str) -> NoReturn:
        raise ScheduleError(f"{self._operations[self._now].named} {what}")

    def _rounds(self) -> tuple[Round, ...]:
        """All messages, each in its earliest round. Raises `ScheduleError` where rounds cannot order them."""
        for (rank, chunk), made in self._made.items():
            for version, (makers, following) in enumerate(zip(made, [*made[1:], []], strict=True)):
                carried = self._carried[rank, chunk, version]
                for maker in makers:
                    maker.later += [(message, 1) for message in (*carried, *following)]
                for message in carried:
                    message.later += [(taken, 0) for taken in following]
        self._delay()
        rounds: defaultdict[int, dict[tuple[int, int, int, bool], list[int]]] = defaultdict(dict)
        for message in self._messages:
            if message.merge is not None:
                key = (message.sender, message.src, message.dst, message.merge)
                rounds[message.round].setdefault(key, []).append(message.chunk)
        return tuple(
            tuple(
                Transfer(src, dst, run, merge)
                for (_, src, dst, merge), numbers in rounds[number].items()
                for run in runs_of(numbers)
            )
            for number in sorted(rounds)
        )

    def _delay(self) -> None:
        """Move messages to later rounds until each comes after all that it has to."""
        waiting = list(self._messages)
        while waiting:
            message = waiting.pop()
            for other, rounds in message.later:
                if other.round < message.round + rounds:
                    other.round = message.round + rounds
                    if other.round > len(self._messages):
                        raise ScheduleError(
                            f"messages {other.src}->{other.dst} and {message.src}->{message.dst} overtake "
                            "each other, which no rounds can say"
                        )
                    waiting.append(other)
