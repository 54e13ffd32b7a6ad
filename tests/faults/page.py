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

What happens when something breaks, done for real by `tests/faults` (`make faults` does every row and measures
it). A wait for other ranks ends after `TREEATTN_TIMEOUT` seconds, {limit} in these jobs and 600 unless set;
*gone after* is the longest from the fault to the end of the last process in {jobs} jobs (2 cores, {cpu}).

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
    yield f"At a drawn moment of {', '.join(f'`{name}`' for name in table.TOGETHER)}:"
    yield ""
    yield "| what happens | one sees on standard error | exit code | gone after | what is kept |"
    yield "| --- | --- | --- | --- | --- |"
    for fault in table.FAULTS:
        codes = ", ".join(map(str, fault.codes))
        yield f"| {fault.name} | {fault.shown} | {codes} | {_after(rows, fault.name)} | {fault.kept} |"
    yield ""
    yield "The code is 0 where the rank had nothing left to do. 2, 9, 15, 134, 137, 139: the launchers' own."
    yield ""
    yield "## A program"
    yield ""
    yield f"Rank 1 of 2 comes to grief before each of: {', '.join(table.PHASES)}."
    yield f"Started by {', '.join(table.LAUNCHERS)}:"
    yield ""
    yield "| rank 1 | one sees | gone after |"
    yield "| --- | --- | --- |"
    for grief in table.GRIEFS:
        yield f"| {grief.name} | {grief.shown} | {_after(rows, grief.name)} |"
    yield ""
    yield "Whoever is stopped before `close` or the end of the process leaves the others in `MPI_Finalize`,"
    yield "which a program of yours calls and which has no limit. The commands call it under theirs."
    yield ""
    yield "## A disk that is full"
    yield ""
    yield "`FILE: cannot be written (No space left on device)`, exit code 1, and no file is left there, under"
    names = ", ".join(f"`{name}`" for name in table.WRITERS)
    yield f"every file that a command writes: {names}; and standard output."


def _after(rows: dict, name: str) -> str:
    return f"{rows[name]['seconds']:.1f} s" if name in rows else "not measured yet"


def read(path: Path = RESULTS) -> dict:
    """What was measured."""
    return json.loads(path.read_text())
