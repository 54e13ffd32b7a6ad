"""Does every row, measures from the fault to the end of the last process, and writes results and the page.

python -m tests.faults [REPEATS [commands|programs|elsewhere|PHASE]]

A part takes the place of what was measured of its rows; the jobs of a PHASE of programs are added to them.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from treeattn.study import environment

from . import jobs, page, play, table


@functools.cache
def present(launcher: str) -> bool:
    if lacking := jobs.lacking(launcher):
        print(f"not by {launcher}: {lacking}", file=sys.stderr)
    return not lacking


def measure(repeats: int, part: str, folder: Path) -> dict:
    rows = {}

    def done(name: str, where: str, play: Callable[[], float | None]) -> None:
        failed, seconds = [], 0.0
        try:
            seconds = play()
        except (AssertionError, OSError, subprocess.TimeoutExpired) as error:
            failed = [where]
            print(error, file=sys.stderr)
        if seconds is None:
            print(f"{name}, {where}: not on this machine", file=sys.stderr)
            return
        row = rows.setdefault(name, {"jobs": 0, "seconds": 0.0, "failed": []})
        row["jobs"] += 1
        row["failed"] += failed
        row["seconds"] = max(row["seconds"], round(seconds, 2))
        print(f"{name}, {where}: {'FAILED' if failed else f'{seconds:.1f} s'}", file=sys.stderr)

    for fault, command, launcher in table.faults() if part in ("", "commands") else ():
        for seed in range(repeats if present(launcher) else 0):
            where = f"{command}, {launcher}"
            done(fault.name, where, partial(play.befall, fault, command, launcher, folder, seed))
    for spoiled in table.SPOILED if part in ("", "commands") else ():
        for command in table.READERS:
            for seed in range(6 * repeats):
                done(f"a file {spoiled.name}", command, partial(play.spoil, spoiled, command, folder, seed))
    for grief, phase, launcher in table.griefs() if part in ("", "programs", *table.PHASES) else ():
        wanted = part not in table.PHASES or part == phase
        for _ in range(repeats if wanted and present(launcher) else 0):
            where = f"{phase}, {launcher}"
            done(grief.name, where, partial(play.come_to_grief, grief, phase, launcher, folder))
    for row in table.ELSEWHERE if part in ("", "elsewhere") else ():
        for _ in range(repeats):
            done(row.name, row.test, partial(play.elsewhere, row, folder))
    return rows


def main(repeats: int = 1, part: str = "") -> int:
    """Each row names the commits that it was measured by."""
    software = environment.software()
    commit = software.pop("git") or ""
    if "+dirty" in commit:
        sys.exit("this checkout has changes: commit them, so that the times are those of a commit")
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(repeats, part, play.prepared(Path(folder)))
    known = page.read()["rows"]
    for name, row in rows.items():
        row["commits"] = [commit]
        if part in table.PHASES and name in known:
            rows[name] = _together(known[name], row)
    facts = {"software": software, "cpu": environment.cpu_name(), "rows": known | rows}
    page.RESULTS.write_text(json.dumps(facts, indent=1) + "\n")
    page.PAGE.write_text(page.text(facts))
    return int(any(row["failed"] for row in rows.values()))


def _together(one: dict, other: dict) -> dict:
    lists = {name: list(dict.fromkeys(one[name] + other[name])) for name in ("failed", "commits")}
    seconds = max(one["seconds"], other["seconds"])
    return {"jobs": one["jobs"] + other["jobs"], "seconds": seconds} | lists


sys.exit(main(*map(int, sys.argv[1:2]), *sys.argv[2:3]))
