"""GOAL text: what each rank sends, receives and computes, and what waits for what.

GOAL says no word of data. A reduction is read out of it so: a send carries its rank's own contribution and
all that was received before it; what arrives is merged where it holds none of the ranks that are there
already, and takes their place where it holds all of them. All messages are of one size, since nothing says
which part of the records a smaller one carries.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import NamedTuple

from treeattn.collectives.formats.rounds import Message, Order, Rounds
from treeattn.collectives.parameters import RANK_LIMIT
from treeattn.collectives.schedule import Schedule
from treeattn.errors import ScheduleError

_PLACE = r"(?:\s+cpu\s+\d+)?(?:\s+nic\s+\d+)?"
# No number is longer than 18 digits: others are no line of GOAL.
_MESSAGE = re.compile(
    rf"(\w+):\s*(send|recv)\s+(\d{{1,18}})b\s+(to|from)\s+(\d{{1,18}})(?:\s+tag\s+(\d{{1,18}}))?{_PLACE}"
)
_CALC = re.compile(rf"(\w+):\s*calc\s+\d+{_PLACE}")
_REQUIRES = re.compile(r"(\w+)\s+requires\s+(\w+)")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


class _Operation(NamedTuple):
    rank: int
    named: str
    message: tuple[int, int, int] | None = None  # source, destination, tag
    sends: bool = False
    size: int = 0


def read(text: str, name: str = "goal") -> Schedule:
    """The schedule of a GOAL file. Raises `ScheduleError` that names what cannot be read or is wrong."""
    size, operations, after = _parse(text)
    pairs = _matched(operations)
    for received, sent in pairs.items():
        after[received].append(sent)
    order = Order(after, [operation.named for operation in operations])
    return _Ranks(size, operations, pairs, order).schedule(name)


def _parse(text: str) -> tuple[int, list[_Operation], list[list[int]]]:
    lines = [line.strip() for line in _COMMENT.sub("", text).splitlines()]
    head = re.fullmatch(r"num_ranks\s+(\d{1,18})", next(filter(None, lines), ""))
    if head is None or not 1 <= int(head[1]) <= RANK_LIMIT:
        raise ScheduleError(f"not GOAL: it does not begin with num_ranks, 1 to {RANK_LIMIT}")
    size, rank = int(head[1]), None
    operations: list[_Operation] = []
    labels: dict[tuple[int, str], int] = {}
    waits: list[tuple[int, str, str]] = []
    seen: set[int] = set()
    for number, line in enumerate(lines, 1):
        begins = re.fullmatch(r"rank\s+(\d{1,18})\s*\{", line)
        if begins and rank is None and int(begins[1]) < size and int(begins[1]) not in seen:
            rank = int(begins[1])
            seen.add(rank)
        elif line == "}" and rank is not None:
            rank = None
        elif rank is not None and (found := _REQUIRES.fullmatch(line)):
            waits.append((rank, found[1], found[2]))
        elif rank is not None and (found := _MESSAGE.fullmatch(line) or _CALC.fullmatch(line)):
            if (rank, found[1]) in labels:
                raise ScheduleError(f"line {number}: rank {rank} has two operations {found[1]:.40}")
            labels[rank, found[1]] = len(operations)
            operations.append(_operation(rank, found, size))
        elif line and line is not None and not line.startswith("num_ranks"):
            raise ScheduleError(f"line {number}: {line!r:.60} cannot be read")
    after: list[list[int]] = [[] for _ in operations]
    for rank, waiting, wanted in waits:
        if (rank, waiting) not in labels or (rank, wanted) not in labels:
            raise ScheduleError(f"rank {rank}: {waiting:.40} requires {wanted:.40}, which are not both there")
        after[labels[rank, waiting]].append(labels[rank, wanted])
    return size, operations, after


def _operation(rank: int, found: re.Match[str], size: int) -> _Operation:
    named = f"rank {rank}, {found[1]:.40}"
    if found.re is _CALC:
        return _Operation(rank, named)
    _, kind, count, preposition, other, tag = found.groups()
    sends, peer = kind == "send", int(other)
    if peer >= size or peer == rank or (preposition == "to") != sends:
        raise ScheduleError(f"{named}: {kind} {preposition} {peer} is no message to or from another rank")
    ends = (rank, peer) if sends else (peer, rank)
    return _Operation(rank, named, (*ends, int(tag or 0)), sends, int(count))


def _matched(operations: list[_Operation]) -> dict[int, int]:
    """Receive -> its send. Messages of one tag between two ranks match in the order of the file."""
    posted: defaultdict[tuple[int, int, int], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for number, operation in enumerate(operations):
        if operation.message:
            posted[operation.message][operation.sends].append(number)
    for (src, dst, tag), (received, sent) in posted.items():
        if len(received) != len(sent):
            raise ScheduleError(
                f"rank {src} sends {len(sent)} messages to rank {dst} with tag {tag}, which receives "
                f"{len(received)}"
            )
    pairs = {r: s for received, sent in posted.values() for r, s in zip(received, sent, strict=True)}
    sizes = {operations[number].size for pair in pairs.items() for number in pair}
    if len(sizes) > 1:
        raise ScheduleError(
            f"messages of {min(sizes)} and {max(sizes)} bytes: GOAL does not say which part of the records "
            "the smaller ones carry"
        )
    return pairs


class _Ranks:
    """What the ranks hold, operation by operation."""

    def __init__(self, size: int, operations: list[_Operation], pairs: dict[int, int], order: Order) -> None:
        self.size, self.operations, self.order, self.pairs = size, operations, order, pairs
        self.rounds = Rounds()
        self.arrived: list[dict[int, Message]] = [{} for _ in range(size)]  # receive -> message
        # of each rank, by version: the receives that are in it, and the ranks as a bit mask
        self.versions = [[(frozenset[int](), 1 << rank)] for rank in range(size)]
        self.carries: dict[Message, int] = {}

    def schedule(self, name: str) -> Schedule:
        messages: dict[int, Message] = {}
        for number in self.order.sorted:
            rank, named, message, sends, _ = self.operations[number]
            if message and sends:
                wanted = frozenset(r for r in self.arrived[rank] if self.order.before(r, number))
                version = self._version(rank, wanted, named)
                messages[number] = self.rounds.send(rank, message[1], 0, version, number)
                self.carries[messages[number]] = self.versions[rank][version][1]
            elif message:
                self.arrived[rank][number] = messages[self.pairs[number]]
        for rank in range(self.size):
            self._version(rank, frozenset(self.arrived[rank]), f"the end of rank {rank}")
        root = not any(o.sends and o.rank == 0 for o in self.operations) and self.size > 1
        return self.rounds.schedule(name, self.size, 1, "root" if root else "replicated")

    def _version(self, rank: int, wanted: frozenset[int], named: str) -> int:
        """The version of what `rank` holds that takes in just the `wanted` receives."""
        versions = self.versions[rank]
        for version, (there, _) in enumerate(versions):
            if there == wanted:
                return version
        if not versions[-1][0] < wanted:
            other = min(versions[-1][0] - wanted)
            raise ScheduleError(
                f"{named} does not require {self.operations[other].named}, which another send requires"
            )
        left = wanted - versions[-1][0]
        while left:
            first = [r for r in sorted(left) if not any(self.order.before(o, r) for o in left)]
            self._take(rank, first)
            left -= set(first)
        return len(versions) - 1

    def _take(self, rank: int, receives: list[int]) -> None:
        """Receives without an order among them are merged at once."""
        there, ranks = self.versions[rank][-1]
        messages = [self.arrived[rank][receive] for receive in receives]
        masks = [self.carries[message] for message in messages]
        copies = len(masks) == 1 and not ranks & ~masks[0]
        if not copies:
            for receive, mask in zip(receives, masks, strict=True):
                if ranks & mask:
                    raise ScheduleError(
                        f"{self.operations[receive].named} brings ranks that are there already"
                    )
                ranks |= mask
        self.rounds.take(messages, merge=not copies)
        self.versions[rank].append((there | set(receives), masks[0] if copies else ranks))
