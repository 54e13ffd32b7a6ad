#!/usr/bin/env python3
"""Run folders of the job scripts to one table and the figures: jobs/collect.py runs/* --out collected

`collected/table.csv` has a row for each scheme of each run: times in microseconds, of `compare` with their
95 percent interval, of `decode` the medians of its parts together, of `generate` a token's. `treeattn plot`
draws `collected/figures/` where there are results of `compare`. Runs that are not done give what they have,
and are named. Exit code: 1 if something could not be read or drawn, 2 for bad arguments.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from treeattn import files
from treeattn.errors import TreeattnError
from treeattn.study.compare.rows import read
from treeattn.study.compare.summary import summarise

COLUMNS = ("run", "status", "what", "scheme", "ranks", "nodes", "tokens", "median_us", "low_us", "high_us")


def rows(folder: Path, status: str) -> Iterator[tuple[Any, ...]]:
    """What a run folder holds, as `COLUMNS`. Raises whatever a file that is something else brings about."""
    if (compared := folder / "results.jsonl").exists():
        for row in _compared(compared):
            yield folder.name, status, *row
    if (written := folder / "results.json").exists():
        facts = json.loads(written.read_text())
        for row in _decoded(facts) if "results" in facts else _generated(facts):
            yield folder.name, status, *row


def _compared(path: Path) -> Iterator[tuple[Any, ...]]:
    for row in summarise(read(path)):
        where = row["ranks"], len(set(row["nodes"])), row["tokens"] or None
        yield row["what"], row["label"], *where, row["time_us"], row["low_us"], row["high_us"]


def _decoded(facts: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    for row in facts["results"]:
        time = sum(row["step_s"].values()) * 1e6
        yield "decode a cache", row["scheme"], *_where(facts), facts["tokens"], time, None, None


def _generated(facts: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    time = facts["step_p50_s"] * 1e6 if facts["step_p50_s"] is not None else None
    yield "generate", facts["scheme"], *_where(facts), facts["prompt_tokens"], time, None, None


def _where(facts: dict[str, Any]) -> tuple[int, int]:
    return len(facts["ranks"]), len({rank["node"] for rank in facts["ranks"]})


def table(folders: list[Path]) -> tuple[list[tuple[Any, ...]], bool]:
    """All rows, and whether every folder could be read."""
    found, whole = list[tuple[Any, ...]](), True
    for folder in folders:
        try:
            status = (folder / "status").read_text().strip()
            found += rows(folder, status)
        except (TreeattnError, OSError, ValueError, KeyError, TypeError) as error:
            print(f"collect: {folder}: no run folder that can be read ({error}); left out", file=sys.stderr)
            whole = False
            continue
        if status != "done":
            print(f"collect: {folder}: {status}; what it has is in the table", file=sys.stderr)
    return found, whole


def figures(folders: list[Path], out: Path) -> bool:
    """Draw all results of `compare` together; whether that was possible."""
    compared = [folder / "results.jsonl" for folder in folders if (folder / "results.jsonl").exists()]
    if not compared:
        return True
    return subprocess.run([sys.executable, "-m", "treeattn", "plot", *compared, "--out", out]).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path, help="run folders, such as runs/*")
    parser.add_argument("--out", type=Path, default=Path("collected"), help="default: collected")
    given = parser.parse_args()
    try:
        given.out.mkdir(exist_ok=True)
        write = files.output_writer(given.out / "table.csv")
    except (OSError, TreeattnError) as error:
        print(f"collect: --out {given.out}: {error}", file=sys.stderr)
        return 2
    found, whole = table(given.folders)
    if not found:
        print("collect: no results in these folders", file=sys.stderr)
        return 1
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([COLUMNS, *found])
    write(text.getvalue().encode())
    print(f"{given.out}/table.csv: {len(found)} rows of {len({row[0] for row in found})} runs")
    return int(not (figures(given.folders, given.out / "figures") and whole))


if __name__ == "__main__":
    sys.exit(main())
