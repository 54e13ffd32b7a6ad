"""What each rank does in each round, as exports to simulators of networks write it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from treeattn.collectives.check import check
from treeattn.collectives.schedule import Schedule
from treeattn.collectives.traffic import messages


class Operation(NamedTuple):
    """A message of `size` bytes to or from `peer`; the tag is its own."""

    sends: bool
    peer: int
    size: int
    tag: int


@dataclass
class RankRound:
    """What one rank does in one round. merged: records that it merges on arrival."""

    operations: list[Operation] = field(default_factory=list)
    merged: int = 0


def steps(schedule: Schedule, records: int, record_bytes: int, group: int) -> list[list[RankRound]]:
    """Per rank, the rounds in which it has something to do. Chunks without records are not sent.

    Raises `ScheduleError` for a schedule that does not check.
    """
    check(schedule)
    found: list[list[RankRound]] = [[] for _ in range(schedule.size)]
    tag = 0
    for _, in_round in groupby(messages(schedule, records, group), key=attrgetter("round")):
        now: defaultdict[int, RankRound] = defaultdict(RankRound)
        for _, src, dst, carried, merge in in_round:
            size = carried * record_bytes
            now[src].operations.append(Operation(True, dst, size, tag))
            now[dst].operations.append(Operation(False, src, size, tag))
            now[dst].merged += carried * merge
            tag += 1
        for rank, step in now.items():
            found[rank].append(step)
    return found
