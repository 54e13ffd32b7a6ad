"""Does every row, measures from the fault to the end of the last process, and writes results and the page.

Neither is written where the checkout has changes: such a time is of no commit.

python -m tests.faults [REPEATS [commands|programs|elsewhere]]
"""

from __future__ import annotations

import functools
import json
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
        except AssertionError as error:
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
    for grief, phase, launcher in table.griefs() if part in ("", "programs") else ():
        for _ in range(repeats if present(launcher) else 0):
            where = f"{phase}, {launcher}"
            done(grief.name, where, partial(play.come_to_grief, grief, phase, launcher, folder))
    for row in table.ELSEWHERE if part in ("", "elsewhere") else ():
        for _ in range(repeats):
            done(row.name, row.test, partial(play.elsewhere, row, folder))
    return rows


def main(repeats: int = 1, part: str = "") -> int:
    """What is not of this part stays as it was measured."""
    software = environment.software()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(repeats, part, play.prepared(Path(folder)))
    if "+dirty" in (software["git"] or ""):
        print("nothing is written: this checkout has changes", file=sys.stderr)
    else:
        facts = {"software": software, "cpu": environment.cpu_name(), "rows": page.read()["rows"] | rows}
        page.RESULTS.write_text(json.dumps(facts, indent=1) + "\n")
        page.PAGE.write_text(page.text(facts))
    return int(any(row["failed"] for row in rows.values()))


sys.exit(main(*map(int, sys.argv[1:2]), *sys.argv[2:3]))
