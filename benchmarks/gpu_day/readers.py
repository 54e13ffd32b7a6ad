"""What the tools of a step left behind, as data for JSON.

Each reader returns the data and, where the tool found something wrong, that in one line; it raises
`ValueError` where the output is not that of a run that went to its end.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from gpu_day import ncu

Read = tuple[Any, str | None]

# The last line of each tool. Racecheck alone counts warnings as well, which are hazards too.
_SUMMARY = re.compile(
    r"^=+ (?:ERROR SUMMARY: (\d+) errors?|RACECHECK SUMMARY: (\d+) hazards? displayed)", re.M
)
_FINDING = re.compile(
    r"^=+ ((?:Invalid|Uninitialized|Misaligned|Error|Program hit|Warning|Potential)\b.*)$", re.M
)


def read_json(text: str) -> Read:
    """One document."""
    return json.loads(text), None


def read_tests(text: str) -> Read:
    """pytest's JUnit file. Nothing that ran is as bad as something that failed."""
    cases = ElementTree.fromstring(text).iter("testcase")
    # Without a name: the one that was running when pytest was interrupted.
    named = [case for case in cases if case.get("name")]
    outcomes = [(f"{case.get('classname')}::{case.get('name')}", *_outcome(case)) for case in named]
    counts = Counter(outcome for _, outcome, _ in outcomes)
    failed = {name: why for name, outcome, why in outcomes if outcome == "failed"}
    skipped = Counter(why for _, outcome, why in outcomes if outcome == "skipped")
    data = {"passed": counts["passed"], "failed": failed, "skipped": dict(skipped)}
    if failed:
        return data, f"{len(failed)} tests failed, the first is {next(iter(failed))}"
    if not counts["passed"]:
        raise ValueError(f"no test ran: {next(iter(skipped), 'none was found')}")
    return data, None


def _outcome(case: ElementTree.Element) -> tuple[str, str]:
    for tag, outcome in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        found = case.find(tag)
        if found is not None:
            return outcome, (found.get("message") or "").partition("\n")[0]
    return "passed", ""


def read_sanitizer(text: str) -> Read:
    """The log of compute-sanitizer: the number of its last line, and what it found first."""
    *_, last = [None, *_SUMMARY.finditer(text)]
    if last is None or "terminated before first instrumented API call" in text:
        raise ValueError("compute-sanitizer watched no program to its end")
    count, found = int(last[1] or last[2]), _FINDING.findall(text)
    data = {"errors": count, "first": found[:5]}
    return data, f"{count} errors: {found[0] if found else 'see the log'}" if count else None


def read_ncu(text: str) -> Read:
    """Nsight Compute's table; all launches of `gpu_day.attend` in their order, or an error."""
    return ncu.launches(text), None


READERS = {"json": read_json, "tests": read_tests, "sanitizer": read_sanitizer, "ncu": read_ncu}


def read(reader: str, path: Path) -> Read:
    """What lies in a file. Raises `ValueError` where there is none, or it cannot be what the tool writes."""
    try:
        return READERS[reader](path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        raise ValueError("it wrote no result") from None
    except ElementTree.ParseError as error:
        raise ValueError(f"its report breaks off: {error}") from error
