"""A schedule for simulators of networks: what each rank does in each round, as GOAL.

GOAL text is the input of LogGOPSim and others: Hoefler, Siebert, Lumsdaine, "Group Operation Assembly
Language", ICPP 2009; the grammar is the one of LogGOPSim's txt2bin.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import groupby

from treeattn.collectives.check import check
from treeattn.collectives.schedule import Schedule


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
    programs: list[list[str]] = [[] for _ in range(schedule.size)]
    closed = [0] * schedule.size  # label of what ends the last round of a rank
    sent = enumerate(schedule.traffic(records, group))
    for _, in_round in groupby(sent, key=lambda numbered: numbered[1].round):
        started: defaultdict[int, list[str]] = defaultdict(list)
        merged: Counter[int] = Counter()
        for tag, (_, src, dst, carried, merge) in in_round:
            started[src].append(f"send {carried * record_bytes}b to {dst} tag {tag}")
            started[dst].append(f"recv {carried * record_bytes}b from {src} tag {tag}")
            merged[dst] += carried * merge
        for rank, operations in started.items():
            programs[rank] += _round(operations, closed[rank], merged[rank] * merge_nanoseconds)
            closed[rank] += len(operations) + 1
    ranks = (["", f"rank {rank} {{", *program, "}"] for rank, program in enumerate(programs))
    return "\n".join([f"num_ranks {schedule.size}", *(line for lines in ranks for line in lines)]) + "\n"


def _round(operations: list[str], before: int, nanoseconds: int) -> Iterator[str]:
    """A rank's round: its messages wait for what ended the last one; a `calc`, the merges, ends this one."""
    end = before + len(operations) + 1
    for label, operation in enumerate(operations, before + 1):
        yield f"l{label}: {operation}"
        if before:
            yield f"l{label} requires l{before}"
    yield f"l{end}: calc {nanoseconds}"
    yield from (f"l{end} requires l{label}" for label in range(before + 1, end))
