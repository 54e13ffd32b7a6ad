"""Programs over the buffers of all ranks, followed chunk by chunk and turned into a `Schedule`.

A program is a list of operations, each of which writes sums of cells to cells. A message is a cell that is
written from a cell of another rank. Operations are followed in an order in which each comes after what it
waits for: a program that leaves the order of two uses of a cell open is read in one of them, and what is read
is proved like any schedule. A sum of unlike chunks, a message that is added twice and a result that is not
there are refused.

What a rank holds of a chunk goes through versions: its own contribution is version 0, and each time it takes
in what has reached it there is the next. A message carries one version. In a `Schedule` all transfers of a
round read what stood when it began, so a message comes after the round that made its version, and not after
the round that makes the next.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple, NoReturn, TypeAlias

from treeattn.collectives.combinators import runs_of
from treeattn.collectives.schedule import Result, Schedule, Transfer
from treeattn.errors import ScheduleError


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
    """One chunk of one message; those of one `sender`, an operation, become one transfer."""

    src: int
    dst: int
    chunk: int
    sender: int
    merge: bool | None = None  # None until it is taken in
    settled: _Held | None = None  # what its receiver then holds; None where it was added to something
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
    """Operations over buffers i (input, `chunks` of the records), o (output; i where `in_place`) and s."""

    def __init__(
        self, operations: Sequence[Operation], size: int, chunks: int, result: Result, in_place: bool
    ) -> None:
        self._operations = operations
        self._nothing = Schedule("", size, chunks, (), result)
        self._in_place = in_place
        self._contents: dict[Cell, _Content] = {}
        self._messages: list[_Message] = []
        # (rank, chunk) -> for each version, who made it; and who carries it
        self._made: defaultdict[tuple[int, int], list[list[_Message]]] = defaultdict(lambda: [[]])
        self._carried: defaultdict[tuple[int, int, int], list[_Message]] = defaultdict(list)
        self._now = ""  # what is followed, as an error calls it

    def schedule(self, name: str) -> Schedule:
        """The schedule that sends the same messages. Raises `ScheduleError`."""
        for number in self._order():
            self._now = self._operations[number].named
            for target, sources in self._operations[number].writes:
                self._write(number, target, sources)
        own_room = self._nothing.result == "scattered" and not self._in_place
        for rank in range(self._nothing.size):
            self._now = f"rank {rank} in the end"
            for chunk in self._nothing.promised(rank):
                cell = Cell(rank, "i" if self._in_place else "o", 0 if own_room else chunk)
                if self._settled(self._content(cell)) != (chunk, self._version(rank, chunk)):
                    self._refuse(f"lacks the result of chunk {chunk} in {cell}")
        self._order_messages()
        return self._in_rounds(name)

    def _order(self) -> list[int]:
        waits = {number: operation.after for number, operation in enumerate(self._operations)}
        try:
            return list(TopologicalSorter(waits).static_order())
        except CycleError as error:
            cycle = ", ".join(self._operations[number].named for number in error.args[1][1:4])
            raise ScheduleError(f"deadlock: {cycle} wait for each other") from None

    def _write(self, number: int, target: Cell, sources: tuple[Cell, ...]) -> None:
        rank = self._operations[number].rank
        contents = [self._content(source) for source in sources]
        content = contents[0] if len(contents) == 1 else self._sum(rank, contents)
        if target.rank != rank:
            held = self._settled(content)
            content = _Message(rank, target.rank, held.chunk, number)
            self._messages.append(content)
            self._carried[rank, held.chunk, held.version].append(content)
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
        if base.version != self._version(rank, base.chunk):
            self._refuse(f"adds to chunk {base.chunk} as it was before other ranks' parts were added")
        return self._take(arrived, merge=True)

    def _content(self, cell: Cell) -> _Content:
        content = self._contents.get(cell)
        if content is None:
            if cell.buffer != "i" or cell.at >= self._nothing.chunks:
                self._refuse(f"reads {cell}, where nothing is yet")
            return _Held(cell.at, 0)
        if isinstance(content, _Message) and content.merge is not None:
            if content.settled is None:
                self._refuse(f"uses what reached {cell} after it was added already")
            return content.settled
        return content

    def _settled(self, content: _Content) -> _Held:
        """A message that is passed on, or the result, takes the place of what its receiver held."""
        if isinstance(content, _Message):
            content.settled = self._take([content], merge=False)
            return content.settled
        return content

    def _version(self, rank: int, chunk: int) -> int:
        """The newest version that `rank` has of `chunk`."""
        return len(self._made[rank, chunk]) - 1

    def _take(self, messages: list[_Message], merge: bool) -> _Held:
        """Their receiver merges them all into what it holds, or one takes its place: the new version."""
        rank, chunk = messages[0].dst, messages[0].chunk
        for message in messages:
            message.merge = merge
        self._made[rank, chunk].append(messages)
        return _Held(chunk, self._version(rank, chunk))

    def _order_messages(self) -> None:
        """Find the earliest round of each. Raises `ScheduleError` where rounds cannot order them."""
        for (rank, chunk), made in self._made.items():
            for version, makers in enumerate(made):
                carried = self._carried[rank, chunk, version]
                following = made[version + 1] if version + 1 < len(made) else []
                for maker in makers:
                    maker.later += [(message, 1) for message in (*carried, *following)]
                for message in carried:
                    message.later += [(taken, 0) for taken in following]
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

    def _in_rounds(self, name: str) -> Schedule:
        rounds: defaultdict[int, dict[tuple[int, int, int, bool], list[int]]] = defaultdict(dict)
        for message in self._messages:
            if message.merge is not None:
                key = (message.sender, message.src, message.dst, message.merge)
                rounds[message.round].setdefault(key, []).append(message.chunk)
        made_of = tuple(
            tuple(
                Transfer(src, dst, run, merge)
                for (_, src, dst, merge), numbers in rounds[number].items()
                for run in runs_of(numbers)
            )
            for number in sorted(rounds)
        )
        nothing = self._nothing
        return Schedule(name, nothing.size, nothing.chunks, made_of, nothing.result)

    def _refuse(self, what: str) -> NoReturn:
        raise ScheduleError(f"{self._now} {what}")
