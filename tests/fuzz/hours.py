"""Fuzzers for so many hours of processor time, two side by side; adds them to docs/results/fuzz.json.

python -m tests.fuzz.hours HOURS

Ends at the first find, which its log in build/fuzz shows. Inputs of one kind take five minutes at a time.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.inputs import INPUTS, ROOT
from treeattn.study import environment

RESULTS = ROOT / "docs/results/fuzz.json"
LOGS = ROOT / "build/fuzz"
GUIDED = "damaged inputs, guided by coverage: `make fuzz-guided`"


@dataclass(frozen=True)
class Done:
    """What a fuzzer took: kind of input, where coverage guides, and how many of it were read."""

    what: str
    kind: str
    minutes: float
    cases: int


def _drawn() -> Iterator[tuple[str, str, list[str]]]:
    for name, target in itertools.cycle([
        ("state machines, schedules, other drawn inputs: `make fuzz FUZZ=30`", "fuzz"),
        ("compiled kernels under sanitizers: `make fuzz-kernels FUZZ=30`", "fuzz-kernels"),
    ]):  # fmt: skip
        yield name, "", ["make", "-s", target, "FUZZ=30"]


def _guided() -> Iterator[tuple[str, str, list[str]]]:
    for kind in itertools.cycle(INPUTS):
        yield GUIDED, kind, [sys.executable, "-m", "tests.fuzz.guided", kind, "300"]


def run(words: list[str], log: Path) -> subprocess.Popen:
    """One fuzzer, whose words are in the log."""
    with log.open("w") as file:
        return subprocess.Popen(words, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)


def fuzz(hours: float) -> Iterator[Done]:
    """Two fuzzers at a time, until they took so many hours of all processors together."""
    queues, running, spent = [_drawn(), _guided()], {}, 0.0
    while running or spent < 60 * hours:
        if spent < 60 * hours:
            busy = {side for side, *_ in running.values()}
            for side in {0, 1} - busy:
                what, kind, words = next(queues[side])
                log = LOGS / f"hours-{side}.log"
                running[run(words, log).pid] = side, what, kind, log
        pid, status, used = os.wait4(-1, 0)
        _, what, kind, log = running.pop(pid)
        said = log.read_text(errors="replace")
        if status:
            for other in running:
                os.kill(other, signal.SIGTERM)
            sys.exit(f"a find, or a fuzzer that fails: {log}\n{said[-3000:]}")
        minutes = (used.ru_utime + used.ru_stime) / 60
        spent += minutes
        cases = sum(map(int, re.findall(r"number_of_executed_units: (\d+)", said)))
        print(f"{what} {kind}: {minutes:.1f} min, {cases} cases", flush=True)
        yield Done(what, kind, minutes, cases)


def add(facts: dict, done: Done) -> None:
    """To its row, that of its kind of input, and the sum."""
    _add(facts["rows"], {"what": done.what}, done)
    if done.kind:
        _add(facts["kinds"], {"kind": done.kind}, done)
    _add(facts["rows"], {"what": "together"}, done)


def _add(rows: list[dict], name: dict, done: Done) -> None:
    row = next((row for row in rows if row.items() >= name.items()), None)
    if row is None:
        rows.insert(0, row := {**name, "minutes": 0.0, "cases": "-"})
    row["minutes"] = round(row["minutes"] + done.minutes, 1)
    if done.kind:
        row["cases"] = done.cases + (0 if row["cases"] == "-" else row["cases"])


def main(hours: float) -> None:
    LOGS.mkdir(parents=True, exist_ok=True)
    commit = environment.software()["git"]
    for done in fuzz(hours):
        facts = json.loads(RESULTS.read_text())
        add(facts, done)
        facts["commits"] = list(dict.fromkeys([*facts["commits"], commit]))
        RESULTS.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main(float(sys.argv[1]))
