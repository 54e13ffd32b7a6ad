"""The page of the table, `docs/faults.md`: its rows, and how long each was measured to take."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from . import jobs, table

ROOT = jobs.ROOT
RESULTS = ROOT / "docs/results/faults.json"
PAGE = ROOT / "docs/faults.md"

_HEAD = """# Faults

What happens when something breaks. `make faults` causes every row for real and measures it, here in {jobs}
jobs on 2 cores ({cpu}). A wait for other ranks ends after `TREEATTN_TIMEOUT` seconds, {limit} in these
jobs and 600 by default; *gone after* is the longest time from the fault to the end of the last process. A
failed compile, a full disk or a bad file on one rank gives one message and one
[exit code](commands.md) on all of them, at once.

"""


def text(measured: dict) -> str:
    """The page, from what `measure` wrote."""
    rows = measured["rows"]
    count = sum(row["jobs"] for row in rows.values())
    head = _HEAD.format(limit=jobs.LIMIT, jobs=count, cpu=measured["cpu"])
    return head + "\n".join(_lines(rows)) + "\n"


def _lines(rows: dict) -> Iterator[str]:
    yield "## A command on several ranks"
    yield ""
    yield f"Started by {' or '.join(table.LAUNCHERS[:2])}, at a drawn moment of"
    yield f"{', '.join(f'`{name}`' for name in table.TOGETHER)}:"
    yield ""
    yield "| fault | standard error | exit code | gone after | kept |"
    yield "| --- | --- | --- | --- | --- |"
    for fault in table.FAULTS:
        codes = ", ".join(map(str, fault.codes))
        yield f"| {fault.name} | {fault.shown} | {codes} | {_after(rows, fault.name)} | {fault.kept} |"
    yield ""
    yield "2, 9 and 15 are the launchers' codes too; 0 where the rank had finished. SIGHUP ends a"
    yield "command as SIGTERM does, with 129. Where a signal reaches Open MPI's launcher too, that ends with"
    yield "1 and lets no line through. A rank that fails before MPI starts ends the others likewise, or"
    yield "at the limit with 124; MPICH's launcher does not notice one that ends before the command begins."
    yield ""
    yield "## A program"
    yield ""
    yield f"Rank 1 of 2 fails before each of {len(table.PHASES)} calls, from planning to the end. Started by"
    yield f"{', '.join(table.LAUNCHERS)} (not with cache nodes):"
    yield ""
    yield "| rank 1 | message | gone after |"
    yield "| --- | --- | --- |"
    for grief in table.GRIEFS:
        yield f"| {grief.name} | {grief.shown} | {_after(rows, grief.name)} |"
    yield ""
    yield "MPI's are started by `python -m mpi4py`, which ends the job when a rank raises; under plain"
    yield "`python` the others wait until the limit. A rank that is stopped before `close` or its end leaves"
    yield "the others in `MPI_Finalize`, which has no limit in a program of yours."
    yield ""
    yield "## A file while it is read"
    yield ""
    yield f"At a drawn moment of {', '.join(f'`{name}`' for name in table.READERS)}:"
    yield ""
    yield "| the file | message | exit code | gone after |"
    yield "| --- | --- | --- | --- |"
    for spoiled in table.SPOILED:
        codes = ", ".join(map(str, (0, *spoiled.codes)))
        yield f"| {spoiled.name} | {spoiled.shown} | {codes} | {_after(rows, f'a file {spoiled.name}')} |"
    yield ""
    yield "## A disk that is full"
    yield ""
    yield "`FILE: cannot be written (No space left on device)`, exit code 1, and no file is left, for every"
    yield "file that a command writes, and for standard output."
    yield ""
    yield "## Jobs, processes and nodes"
    yield ""
    yield "The time is that of the longest test, from its start."
    yield ""
    yield "| fault | result | over after |"
    yield "| --- | --- | --- |"
    for row in table.ELSEWHERE:
        yield f"| {row.name} | {row.shown} | {_after(rows, row.name)} |"


def _after(rows: dict, name: str) -> str:
    if name not in rows:
        return "not measured yet"
    failed = f", but for {', '.join(rows[name]['failed'])}" if rows[name]["failed"] else ""
    return f"{rows[name]['seconds']:.1f} s{failed}"


def read(path: Path = RESULTS) -> dict:
    """What was measured."""
    return json.loads(path.read_text())
