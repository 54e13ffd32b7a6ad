"""A schedule as GOAL text, the input of LogGOPSim and other network simulators.

Source: Hoefler, Siebert, Lumsdaine, "Group Operation Assembly Language", ICPP 2009; the grammar is the
one of LogGOPSim's txt2bin.
"""

from __future__ import annotations

from collections.abc import Iterator

from treeattn.collectives.drawings.steps import RankRound, steps
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
