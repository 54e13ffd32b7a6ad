"""Writes what one step of gpu_day.sh left behind, with machine, versions, date and command:

python -m gpu_day.record STEP READER FOUND LOG EXIT SECONDS RESULT COMMAND...

FOUND is what the step's tool wrote, READER one of `gpu_day.readers`, LOG what it printed. RESULT is written
if FOUND is of a run that went to its end, also of one that found faults. Exit code 1 unless all is well.
"""

from __future__ import annotations

import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from gpu_day import readers
from gpu_day.machine import machine
from treeattn import files
from treeattn.report import as_json

_TIMEOUT = (124, 137)  # of `timeout`: ended, and killed


def record(
    step: str, reader: str, found: Path, log: Path, exit_code: int, seconds: int, command: list[str]
) -> Any:
    """The document of a result. Raises `ValueError` with the reason where there is none."""
    problem = None if exit_code == 0 else _problem(exit_code, seconds, log)
    try:
        data, wrong = readers.read(reader, found)
    except ValueError as error:
        raise ValueError(f"{error}; {problem}" if problem else str(error)) from error
    words = {str(found): "FILE", sys.executable: "python"}
    return {
        "step": step,
        "command": [words.get(word, word) for word in command],
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seconds": seconds,
        "problem": wrong or problem,
        "machine": machine(),
        "result": data,
    }


def _problem(exit_code: int, seconds: int, log: Path) -> str:
    if exit_code in _TIMEOUT:
        return f"ended after {seconds} s"
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"exit code {exit_code}: {lines[-1].strip() if lines else 'without a word'}"


def main(
    step: str, reader: str, found: str, log: str, code: str, seconds: str, out: str, *command: str
) -> int:
    try:
        facts = record(step, reader, Path(found), Path(log), int(code), int(seconds), list(command))
    except ValueError as error:
        print(f"gpu_day: {step}: no result: {error}", file=sys.stderr)
        return 1
    files.output_writer(Path(out))(as_json(facts))
    print(f"gpu_day: {step}: {facts['problem'] or 'done'} ({seconds} s, {out})", file=sys.stderr)
    return int(facts["problem"] is not None)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
