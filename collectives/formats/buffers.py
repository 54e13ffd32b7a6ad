"""Programs over the buffers of all ranks, followed chunk by chunk and turned into a `Schedule`.

A program is a list of operations, each of which writes sums of cells to cells. A message is a cell that is
written from a cell of another rank. A cell that two operations use without an order, one of them writing, is
a race and refused, as is a sum of unlike chunks, a message that is added twice, a result that is not there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from typing import NamedTuple, NoReturn, TypeAlias

from treeattn.collectives.formats.rounds import Message, Order, Rounds
from treeattn.collectives.schedule import Result, Schedule
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


_Content: TypeAlias = "_Held | Message"


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
        self._operations = list(operations)
        for rank in range(size):
            every = [n for n, operation in enumerate(operations) if operation.rank == rank]
            self._operations.append(Operation(rank, f"the end of rank {rank}", every))
        self._order = Order([o.after for o in self._operations], [o.named for o in self._operations])
        self._nothing = Schedule("", size, chunks, (), result)
        self._in_place = in_place
        self._contents: dict[Cell, _Content] = {}
        self._written: dict[Cell, int] = {}
        self._read: defaultdict[Cell, list[int]] = defaultdict(list)
        self._taken: dict[Message, _Held | None] = {}  # None where it was added to something
        self._rounds = Rounds()
        self._now = 0

    def schedule(self, name: str) -> Schedule:
        """The schedule that sends the same messages. Raises `ScheduleError`."""
        for number in self._order.sorted:
            self._now = number
            for target, sources in self._operations[number].writes:
                self._write(target, sources)
        _, size, chunks, _, result = astuple(self._nothing)
        for rank in range(size):
            self._now = len(self._operations) - size + rank
            for chunk in self._nothing.promised(rank):
                own_room = result == "scattered" and not self._in_place
                cell = Cell(rank, "i" if self._in_place else "o", 0 if own_room else chunk)
                held, newest = self._settled(self._content(cell)), self._rounds.version(rank, chunk)
                if held != (chunk, newest):
                    self._refuse(f"lacks the result of chunk {chunk} in {cell}")
        return self._rounds.schedule(name, size, chunks, result)

    def _write(self, target: Cell, sources: tuple[Cell, ...]) -> None:
        rank = self._operations[self._now].rank
        contents = [self._content(source) for source in sources]
        content = contents[0] if len(contents) == 1 else self._sum(rank, contents)
        if target.rank != rank:
            held = self._settled(content)
            content = self._rounds.send(rank, target.rank, held.chunk, held.version, self._now)
        for other in (*self._read.pop(target, ()), self._written.get(target, self._now)):
            self._check_order(other, target)
        self._written[target] = self._now
        self._contents[target] = content

    def _sum(self, rank: int, contents: list[_Content]) -> _Held:
        """Merge all messages into what the rank holds; without that, the first message takes its place."""
        held = [content for content in contents if isinstance(content, _Held)]
        arrived = [content for content in contents if isinstance(content, Message)]
        if not held:
            held = [self._settled(arrived.pop(0))]
        base = held[0]
        if len(held) > 1 or len({base.chunk, *(message.chunk for message in arrived)}) > 1:
            self._refuse("adds what is no other rank's part of the same chunk")
        if base.version != self._rounds.version(rank, base.chunk):
            self._refuse(f"adds to chunk {base.chunk} as it was before other ranks' parts were added")
        for message in arrived:
            self._taken[message] = None
        return _Held(base.chunk, self._rounds.take(arrived, merge=True))

    def _content(self, cell: Cell) -> _Content:
        if cell in self._written:
            self._check_order(self._written[cell], cell)
        self._read[cell].append(self._now)
        content = self._contents.get(cell)
        if content is None:
            if cell.buffer != "i" or cell.at >= self._nothing.chunks:
                self._refuse(f"reads {cell}, where nothing is yet")
            return _Held(cell.at, 0)
        if isinstance(content, Message) and content in self._taken:
            taken = self._taken[content]
            if taken is None:
                self._refuse(f"uses what reached {cell} after it was added already")
            return taken
        return content

    def _settled(self, content: _Content) -> _Held:
        """A message that is passed on, or the result, takes the place of what its receiver held."""
        if isinstance(content, _Held):
            return content
        self._taken[content] = held = _Held(content.chunk, self._rounds.take([content], merge=False))
        return held

    def _check_order(self, other: int, cell: Cell) -> None:
        if other != self._now and not self._order.before(other, self._now):
            self._refuse(f"uses {cell} without waiting for {self._operations[other].named}")

    def _refuse(self, what: str) -> NoReturn:
        raise ScheduleError(f"{self._operations[self._now].named} {what}")
