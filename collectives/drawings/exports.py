"""A schedule for simulators of networks: what each rank does in each round, as GOAL.

GOAL text is the input of LogGOPSim and others: Hoefler, Siebert, Lumsdaine, "Group GoalMessage Assembly
Language", ICPP 2009; the grammar is the one of LogGOPSim's txt2bin.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from treeattn.collectives.check import check
from treeattn.collectives.schedule import Schedule


class GoalMessage(NamedTuple):
    """A message of `size` bytes to or from `peer`; the tag is its own."""

    sends: bool
    peer: int
    size: int
    tag: int


@dataclass
class RankRound:
    """What one rank does in one round. merged: records that it merges on arrival."""

    operations: list[GoalMessage] = field(default_factory=list)
    merged: int = 0


def steps(schedule: Schedule, records: int, record_bytes: int, group: int) -> list[list[RankRound]]:
    """Per rank, the rounds in which it has something to do. Chunks without records are not sent.

    Raises `ScheduleError` for a schedule that does not check.
    """
    check(schedule)
    found: list[list[RankRound]] = [[] for _ in range(schedule.size)]
    tag = 0
    for _, in_round in groupby(schedule.traffic(records, group), key=attrgetter("round")):
        now: defaultdict[int, RankRound] = defaultdict(RankRound)
        for _, src, dst, carried, merge in in_round:
            size = carried * record_bytes
            now[src].operations.append(GoalMessage(True, dst, size, tag))
            now[dst].operations.append(GoalMessage(False, src, size, tag))
            now[dst].merged += carried * merge
            tag += 1
        for rank, step in now.items():
            found[rank].append(step)
    return found


def goal(
    schedule: Schedule,
    records: int = 16,
    record_bytes: int = 520,
    merge_nanoseconds: int = 0,
    group: int = 1,
) -> str:
    """The schedule over `records` records of `record_bytes` bytes each (16 heads of head_dim 128).

    `merge_nanoseconds`: time to merge one record. `group`: records that are never cut. A rank starts a round
    when all its operations of the round before are done, as the MPI executor does. Chunks without records are
    not sent. Raises `ScheduleError` for a schedule that does not check.
    """
    lines = [f"num_ranks {schedule.size}"]
    for rank, rounds in enumerate(steps(schedule, records, record_bytes, group)):
        lines += ["", f"rank {rank} {{", *_program(rounds, merge_nanoseconds), "}"]
    return "\n".join(lines) + "\n"


def _program(rounds: list[RankRound], merge_nanoseconds: int) -> Iterator[str]:
    """Labelled operations; one `calc` closes each round (the merges) and all of the next wait for it."""
    closed = 0
    for step in rounds:
        labels = range(closed + 1, closed + 1 + len(step.operations))
        for label, operation in zip(labels, step.operations, strict=True):
            sends, peer, size, tag = operation
            to = f"send {size}b to" if sends else f"recv {size}b from"
            yield f"l{label}: {to} {peer} tag {tag}"
            if closed:
                yield f"l{label} requires l{closed}"
        closed = labels.stop
        yield f"l{closed}: calc {step.merged * merge_nanoseconds}"
        yield from (f"l{closed} requires l{label}" for label in labels)
