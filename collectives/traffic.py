"""What a schedule sends, message by message, for a number of records: the one counter of this project.

Executors cut chunks between groups of records (all records of a head) and send no chunk without records.
Whoever counts, predicts or exports traffic asks here; a test holds it to what executors send.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from treeattn.collectives.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Payload:
    """What a rank brings: `records` records of `record_bytes` bytes, never cut within `group` of them.

    copied_bytes: of a record in the rounds that only copy at the end, where it is finished before since some
    of these copies leave a node.
    """

    records: int = 16
    record_bytes: int = 520
    group: int = 1
    copied_bytes: int | None = None

    @property
    def bytes(self) -> int:
        return self.records * self.record_bytes


class Message(NamedTuple):
    """In `round`, counted from 0, rank `src` sends `records` records to `dst`, which merges or keeps them."""

    round: int
    src: int
    dst: int
    records: int
    merge: bool


def messages(schedule: Schedule, records: int, granularity: int = 1) -> Iterator[Message]:
    """All messages of one step over `records` records, never cut within runs of `granularity`, in order."""
    for number, round_ in enumerate(schedule.rounds):
        for t in round_:
            part = schedule.chunk_slice(t.chunks, records // granularity)
            if part.stop > part.start:
                yield Message(number, t.src, t.dst, (part.stop - part.start) * granularity, t.merge)
