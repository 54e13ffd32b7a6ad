"""Runs every part of a suite, whatever became of the others, and sums up on the last line.

Usage: python tools/parts.py NAME COMMAND [NAME COMMAND ..]. A part's numbers are those of the last line that
closes a run of pytest in its output, or of this script; a part without one counts as one test. The exit code
is the largest of the parts'.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections import Counter

CLOSING = re.compile(r"^=*\s*((?:\d+ [a-z]+, )*\d+ [a-z]+) in [\d.]+ ?s\b")
COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # which Open MPI's launcher has pytest write
SHOWN = ("passed", "failed", "skipped")


def run(name: str, command: str) -> tuple[int, Counter[str]]:
    """Exit code of a part, and how many of its tests passed, failed and so on."""
    print(f"\n== {name}: {command}", flush=True)
    process = subprocess.Popen(
        command, shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    counts: Counter[str] = Counter()
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        if closing := CLOSING.match(COLOURS.sub("", line)):
            words = (pair.split() for pair in closing[1].split(", "))
            counts = Counter({word: int(number) for number, word in words})
    code = abs(process.wait())
    counts["failed"] += sum(counts.pop(word, 0) for word in ("error", "errors"))
    if code:
        counts["failed"] = max(1, counts["failed"])
    elif not counts["passed"]:
        counts["passed"] = 1
    return code, counts


def summary(counts: Counter[str], seconds: float) -> str:
    """A line that reads like pytest's."""
    return ", ".join(f"{counts[word]} {word}" for word in SHOWN) + f" in {seconds:.0f} s"


def main() -> int:
    """Run the parts that the command line names; the exit code."""
    words = sys.argv[1:]
    codes, total, lines, begin = [0], Counter[str](), [], time.monotonic()
    for name, command in zip(words[::2], words[1::2], strict=True):
        started = time.monotonic()
        code, counts = run(name, command)
        codes.append(code)
        total += counts
        lines.append(
            f"{'FAILED' if code else 'passed'}  {name}: {summary(counts, time.monotonic() - started)}"
        )
    print("", *lines, summary(total, time.monotonic() - begin), sep="\n")
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
