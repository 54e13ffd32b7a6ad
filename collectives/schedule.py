"""What a reduction over ranks looks like, as plain data.

A `Schedule` says for all ranks at once who sends which chunks to whom in which round, and whether
the receiver merges or overwrites. It holds no communicator, no array and no callback, so the same
object can be composed (`combinators`), proved right (`check`), executed (`executors`) and drawn (`drawings`).

The idea of an algorithm as rounds of plain sends, composed by re-labelling ranks, is the one of
MSCCLang (Cowan et al., ASPLOS 2023) and of GOAL (Hoefler et al., 2009).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import msgspec

from treeattn.collectives.parameters import RANK_LIMIT
from treeattn.errors import RestrictionError, ScheduleError

# A plan of p * p transfers at thousands of ranks would fill the memory of every rank before the first
# message leaves. 2**19 transfers (about 100 MB, a second to check) is a ring over 512 ranks.
TRANSFER_LIMIT = 1 << 19

# How to_json writes a transfer.
_COLUMNS = ("src", "dst", "first_chunk", "end_chunk", "merge")


class Transfer(NamedTuple):
    """One message: rank `src` sends its value of `chunks` to rank `dst`.

    ``merge=True`` folds it into what `dst` holds; ``merge=False`` overwrites (broadcast phases).

    >>> Transfer(3, 1).arrow, Transfer(1, 3, merge=False).arrow
    ('3->1', '1=>3')
    """

    src: int
    dst: int
    chunks: range = range(1)
    merge: bool = True

    @property
    def arrow(self) -> str:
        """``3->1`` for a merge, ``3=>1`` for a copy."""
        return f"{self.src}{'->' if self.merge else '=>'}{self.dst}"


class Transmission(NamedTuple):
    """In `round`, counted from 0, rank `src` sends `records` records to `dst`, which merges or keeps them."""

    round: int
    src: int
    dst: int
    records: int
    merge: bool


@dataclass(frozen=True, slots=True)
class Payload:
    """What a rank brings: `records` records of `record_bytes` bytes, never cut within `group` of them."""

    records: int = 16
    record_bytes: int = 520
    group: int = 1

    @property
    def bytes(self) -> int:
        return self.records * self.record_bytes


Result = Literal["replicated", "scattered", "root"]
RESULTS: tuple[Result, ...] = ("replicated", "scattered", "root")

# The transfers of one round all read the state that stood when the round began. Several merges into
# one (dst, chunk) are allowed; at most one copy, and never together with a merge. Rounds order the data of
# each rank; they are not barriers.
Round = tuple[Transfer, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """A reduction over `size` ranks of records that are cut into `chunks` equal ranges.

    `result` says what the last round leaves behind: ``"replicated"`` (every rank holds every
    chunk complete), ``"scattered"`` (``chunks == size`` and rank r holds chunk r complete) or ``"root"``
    (rank 0 holds every chunk complete, the others nothing that counts).

    >>> rounds = ((Transfer(1, 0),), (Transfer(0, 1, merge=False),))
    >>> schedule = Schedule("there and back", size=2, chunks=1, rounds=rounds)
    >>> collectives.check(schedule).determinism, schedule.messages
    ('A', 2)
    """

    name: str
    size: int
    chunks: int
    rounds: tuple[Round, ...]
    result: Result = "replicated"

    def check_types(self) -> None:
        """Raise `ScheduleError` unless it is made of the types that it is declared with. What the transfers
        do, `check` proves."""
        numbers = (self.size, self.chunks)
        if not (
            isinstance(self.name, str) and isinstance(self.rounds, tuple) and all(map(_is_whole, numbers))
        ):
            raise ScheduleError(
                "a Schedule has a name, whole numbers of ranks and chunks, and a tuple of rounds"
            )
        for round_ in self.rounds:
            if not isinstance(round_, tuple) or not all(map(_is_transfer, round_)):
                raise ScheduleError(
                    f"{self.name}: a round is a tuple of Transfer(src, dst, range(first, end), merge), "
                    f"not {round_!r:.80}"
                )

    @property
    def messages(self) -> int:
        """Transfers in all rounds together (a chunk without records is not sent)."""
        return sum(map(len, self.rounds))

    def promised(self, rank: int) -> range:
        """The chunks that `rank` holds complete in the end."""
        if self.result == "scattered":
            return range(rank, rank + 1)
        return range(self.chunks if self.result == "replicated" or rank == 0 else 0)

    def chunk_slice(self, chunks: range, records: int) -> slice:
        """The records of `chunks` when there are `records` in all; it may be empty."""
        return slice(chunks.start * records // self.chunks, chunks.stop * records // self.chunks)

    def traffic(self, records: int, granularity: int = 1) -> Iterator[Transmission]:
        """All messages of one step over `records` records, never cut within runs of `granularity`, in order.

        Executors send no chunk without records. Whoever counts, predicts or exports messages asks here; a
        test holds it to what executors send.
        """
        for number, round_ in enumerate(self.rounds):
            for t in round_:
                part = self.chunk_slice(t.chunks, records // granularity)
                if part.stop > part.start:
                    yield Transmission(number, t.src, t.dst, (part.stop - part.start) * granularity, t.merge)

    def to_json(self) -> str:
        """One line of JSON; `from_json` gives an equal schedule back."""
        rounds = [
            [[t.src, t.dst, t.chunks.start, t.chunks.stop, int(t.merge)] for t in round_]
            for round_ in self.rounds
        ]
        return json.dumps(
            {
                "name": self.name,
                "size": self.size,
                "chunks": self.chunks,
                "result": self.result,
                "transfer": [*_COLUMNS],
                "rounds": rounds,
            }
        )

    @staticmethod
    def from_json(text: str) -> Schedule:
        """Read what `to_json` wrote, or somebody by hand. Raises `ScheduleError` that names the key and what
        stands there in a right one."""
        try:
            data = msgspec.json.decode(text, type=_Written)
            if data.transfer != _COLUMNS:
                raise msgspec.ValidationError(f"the columns of a transfer are {', '.join(_COLUMNS)}")
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
            raise ScheduleError(
                f"not the JSON of a schedule: {error}; write it as treeattn schedule --format json does"
            ) from None
        rounds = tuple(
            tuple(
                Transfer(src, dst, range(first, end), bool(merge)) for src, dst, first, end, merge in round_
            )
            for round_ in data.rounds
        )
        return Schedule(data.name, data.size, data.chunks, rounds, data.result)


_Count = Annotated[int, msgspec.Meta(ge=1, le=RANK_LIMIT)]


class _Written(msgspec.Struct):
    """What `Schedule.to_json` writes."""

    name: str
    size: _Count
    chunks: _Count
    result: Result
    rounds: list[list[tuple[int, int, int, int, Literal[0, 1]]]]
    transfer: tuple[str, ...] = _COLUMNS


def _is_whole(number: object) -> bool:
    return type(number) is int


def _is_transfer(entry: object) -> bool:
    if not isinstance(entry, Transfer) or type(entry.chunks) is not range:
        return False
    return _is_whole(entry.src) and _is_whole(entry.dst) and type(entry.merge) is bool


def refuse_above_limit(scheme: str, size: int, transfers: int) -> None:
    """Raise `RestrictionError` before a generator makes a plan of too many `transfers` to hold."""
    if transfers > TRANSFER_LIMIT:
        raise RestrictionError(
            f"{scheme} on {size} ranks needs {transfers} transfers, the limit is {TRANSFER_LIMIT}: "
            "take a scheme with fewer messages, such as recursive_doubling or hierarchical"
        )
