"""What comes before what: operations that wait for one another, and messages, ordered by what they carry, as
rounds.

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

from treeattn.collectives.combinators import runs_of
from treeattn.collectives.schedule import Result, Schedule, Transfer
from treeattn.errors import ScheduleError

#: An order keeps a bit for each pair of operations: 128 MB at the limit.
OPERATION_LIMIT = 1 << 15


class Order:
    """`after[n]` are the operations that operation n waits for, `named[n]` how an error calls it.

    Raises `ScheduleError` for operations that wait for each other.
    """

    def __init__(self, after: Sequence[Sequence[int]], named: Sequence[str]) -> None:
        if len(after) > OPERATION_LIMIT:
            raise ScheduleError(f"{len(after)} operations, the limit is {OPERATION_LIMIT}")
        self.named = named
        try:
            self.sorted = list(TopologicalSorter(dict(enumerate(after))).static_order())
        except CycleError as error:
            cycle = ", ".join(named[number] for number in error.args[1][1:4])
            raise ScheduleError(f"deadlock: {cycle} wait for each other") from None
        self._before = [0] * len(after)
        for number in self.sorted:
            for earlier in after[number]:
                self._before[number] |= self._before[earlier] | 1 << earlier

    def before(self, first: int, second: int) -> bool:
        """Whether `first` is always done when `second` begins."""
        return bool(self._before[second] >> first & 1)


@dataclass(eq=False)
class Message:
    """One chunk of one message; those of one `sender`, an operation, become one transfer."""

    src: int
    dst: int
    chunk: int
    sender: int
    merge: bool | None = None  # None until it is taken in
    round: int = 0
    later: list[tuple[Message, int]] = field(default_factory=list)  # who comes at least so many rounds after


class Rounds:
    """Collects what is sent and taken in, in any order that respects causes, and makes the schedule of it."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        # (rank, chunk) -> for each version, who made it and who carries it
        self._made: defaultdict[tuple[int, int], list[list[Message]]] = defaultdict(lambda: [[]])
        self._carried: defaultdict[tuple[int, int, int], list[Message]] = defaultdict(list)

    def version(self, rank: int, chunk: int) -> int:
        """The newest version that `rank` has of `chunk`."""
        return len(self._made[rank, chunk]) - 1

    def send(self, src: int, dst: int, chunk: int, version: int, sender: int) -> Message:
        """A message that carries `version`."""
        message = Message(src, dst, chunk, sender)
        self.messages.append(message)
        self._carried[src, chunk, version].append(message)
        return message

    def take(self, messages: list[Message], merge: bool) -> int:
        """Their receiver merges them all into what it holds, or one takes its place: the new version."""
        rank, chunk = messages[0].dst, messages[0].chunk
        for message in messages:
            message.merge = merge
        self._made[rank, chunk].append(messages)
        return self.version(rank, chunk)

    def schedule(self, name: str, size: int, chunks: int, result: Result) -> Schedule:
        """All messages, each in its earliest round. Raises `ScheduleError` where rounds cannot order them."""
        for (rank, chunk), made in self._made.items():
            for version, makers in enumerate(made):
                carried = self._carried[rank, chunk, version]
                following = made[version + 1] if version + 1 < len(made) else []
                for maker in makers:
                    maker.later += [(message, 1) for message in (*carried, *following)]
                for message in carried:
                    message.later += [(taken, 0) for taken in following]
        self._settle()
        rounds: defaultdict[int, dict[tuple[int, int, int, bool], list[int]]] = defaultdict(dict)
        for message in self.messages:
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
        return Schedule(name, size, chunks, made_of, result)

    def _settle(self) -> None:
        waiting = list(self.messages)
        while waiting:
            message = waiting.pop()
            for other, rounds in message.later:
                if other.round < message.round + rounds:
                    other.round = message.round + rounds
                    if other.round > len(self.messages):
                        raise ScheduleError(
                            f"messages {other.src}->{other.dst} and {message.src}->{message.dst} overtake "
                            "each other, which no rounds can say"
                        )
                    waiting.append(other)
