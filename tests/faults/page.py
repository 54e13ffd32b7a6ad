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

What happens when something breaks, done for real by `tests/faults`: `make faults` does every row and measures
it, here in {jobs} jobs on 2 cores ({cpu}). A wait for other ranks ends after `TREEATTN_TIMEOUT` seconds,
{limit} in these jobs and 600 unless set; *gone after* is the longest from the fault to the end of the last
process, of a program or a file that is read from the start.

Exit codes are those of [the command](commands.md). Whatever ends early tells the others: a failed compile, a
full disk or a bad file on one rank is one sentence and one exit code on
all of them, and no limit is waited for.

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
    yield "| what happens | one sees on standard error | exit code | gone after | what is kept |"
    yield "| --- | --- | --- | --- | --- |"
    for fault in table.FAULTS:
        codes = ", ".join(map(str, fault.codes))
        yield f"| {fault.name} | {fault.shown} | {codes} | {_after(rows, fault.name)} | {fault.kept} |"
    yield ""
    yield "The code is 0 where the rank had nothing left to do; 2, 9 and 15 are the launchers' too. SIGHUP,"
    yield "as a terminal that closes sends it, ends a command as SIGTERM does, with 129; under nohup it does"
    yield "not."
    yield ""
    yield "A signal that reaches ranks alone gives 130, 143 or 129 by either launcher. Where it reaches Open"
    yield "MPI's launcher too, that ends with 1 of its own and lets no line of theirs through."
    yield ""
    yield "A rank that fails before MPI starts ends the others likewise, and a limit reached then gives 124:"
    yield "the command asks the launcher to end the job. One that ends before the command begins, as where a"
    yield "package is missing, is missed by Open MPI's launcher; with MPICH's the others wait for the limit."
    yield ""
    yield "## A program"
    yield ""
    yield f"Rank 1 of 2 comes to grief before each of: {', '.join(table.PHASES)}. It is started by"
    yield f"{', '.join(table.LAUNCHERS)} (not where cache nodes serve); on emulated nodes that are cut off"
    yield "by MPICH:"
    yield ""
    yield "| rank 1 | one sees | gone after |"
    yield "| --- | --- | --- |"
    for grief in table.GRIEFS:
        yield f"| {grief.name} | {grief.shown} | {_after(rows, grief.name)} |"
    yield ""
    yield "Those of MPI are started by `python -m mpi4py`, which ends the job when a rank raises. Where plain"
    yield "`python` starts them, MPI keeps that rank in its end, and the others wait for it until the limit."
    yield ""
    yield "Whoever is stopped before `close` or the end of the process leaves the others in `MPI_Finalize`,"
    yield "which a program of yours calls and which has no limit. The commands call it under theirs."
    yield ""
    yield "## A file while it is read"
    yield ""
    yield f"At a drawn moment of {', '.join(f'`{name}`' for name in table.READERS)}:"
    yield ""
    yield "| the file | one sees | exit code | gone after |"
    yield "| --- | --- | --- | --- |"
    for spoiled in table.SPOILED:
        codes = ", ".join(map(str, (0, *spoiled.codes)))
        yield f"| {spoiled.name} | {spoiled.shown} | {codes} | {_after(rows, f'a file {spoiled.name}')} |"
    yield ""
    yield "## A disk that is full"
    yield ""
    yield "`FILE: cannot be written (No space left on device)`, exit code 1, and no file is left there, under"
    names = ", ".join(f"`{name}`" for name in table.WRITERS)
    yield f"every file that a command writes: {names}; and standard output."
    yield ""
    yield "## Jobs, processes and nodes"
    yield ""
    yield "The time is that of the longest test, from its start."
    yield ""
    yield "| what happens | one sees | over after | done by |"
    yield "| --- | --- | --- | --- |"
    for row in table.ELSEWHERE:
        done = f"`tests/{row.test.split('::')[0]}`"
        yield f"| {row.name} | {row.shown} | {_after(rows, row.name)} | {done} |"


def _after(rows: dict, name: str) -> str:
    if name not in rows:
        return "not measured yet"
    failed = f", but for {', '.join(rows[name]['failed'])}" if rows[name]["failed"] else ""
    return f"{rows[name]['seconds']:.1f} s{failed}"


def read(path: Path = RESULTS) -> dict:
    """What was measured."""
    return json.loads(path.read_text())
