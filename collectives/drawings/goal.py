"""A schedule as GOAL text, the input of LogGOPSim and other network simulators.

Source: Hoefler, Siebert, Lumsdaine, "Group Operation Assembly Language", ICPP 2009; the grammar is the
one of LogGOPSim's txt2bin.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, groupby
from operator import attrgetter

from treeattn.collectives.check import check
from treeattn.collectives.schedule import Schedule
from treeattn.collectives.traffic import messages

__all__ = ["goal"]


@dataclass
class _Step:
    """What one rank does in one round."""

    operations: list[str] = field(default_factory=list)
    merged: int = 0  # records that it merges on arrival


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
    check(schedule)
    lines = [f"num_ranks {schedule.size}"]
    for rank, steps in enumerate(_steps(schedule, records, record_bytes, group)):
        lines += ["", f"rank {rank} {{", *_program(steps, merge_nanoseconds), "}"]
    return "\n".join(lines) + "\n"


def _steps(schedule: Schedule, records: int, record_bytes: int, group: int) -> list[list[_Step]]:
    """Per rank, the rounds in which it has something to do. Every message has a tag of its own."""
    steps: list[list[_Step]] = [[] for _ in range(schedule.size)]
    tags = count()
    for _, in_round in groupby(messages(schedule, records, group), key=attrgetter("round")):
        now: defaultdict[int, _Step] = defaultdict(_Step)
        for _, src, dst, carried, merge in in_round:
            message = f"{carried * record_bytes}b {{}} {{}} tag {next(tags)}"
            now[src].operations.append("send " + message.format("to", dst))
            now[dst].operations.append("recv " + message.format("from", src))
            now[dst].merged += carried * merge
        for rank, step in now.items():
            steps[rank].append(step)
    return steps


def _program(steps: list[_Step], merge_nanoseconds: int) -> Iterator[str]:
    """Labelled operations; one `calc` closes each round (the merges) and all of the next wait for it."""
    closed = 0
    for step in steps:
        labels = range(closed + 1, closed + 1 + len(step.operations))
        for label, operation in zip(labels, step.operations, strict=True):
            yield f"l{label}: {operation}"
            if closed:
                yield f"l{label} requires l{closed}"
        closed = labels.stop
        yield f"l{closed}: calc {step.merged * merge_nanoseconds}"
        yield from (f"l{closed} requires l{label}" for label in labels)
