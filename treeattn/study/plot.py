"""Reads results and says which figures they give; drawing is in `treeattn.study.figures.draw`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from treeattn.errors import ArgumentError, TreeattnError, one_line
from treeattn.selection import select
from treeattn.study.compare import results
from treeattn.study.compare.schema import SUM
from treeattn.study.figures import times
from treeattn.study.figures.cases import ARRIVALS, RANKS, Axis, Case, Study, cases, left_out
from treeattn.study.figures.chart import Chart
from treeattn.study.figures.roofline import is_roofline, roofline


class Figure(NamedTuple):
    """made: what a case gives, perhaps nothing. needs: what the results lack then. axis: of the cases, where
    it is not their own; what has one place on it is left out."""

    made: Callable[[Case], list[Chart]] | None
    needs: str
    axis: Axis | None = None

    def charts(self, study: Study) -> list[Chart]:
        """All charts of this figure; a roofline is of no case."""
        if self.made is None:
            return roofline(study)
        return [chart for case in cases(study, self.axis) for chart in self.made(case)]

    def left_out(self, study: Study) -> tuple[str, ...]:
        """What the charts leave out, with the reasons."""
        return left_out(study, self.axis) if self.axis else ()


#: Name on the command line -> figure.
FIGURES = {
    "time": Figure(times.time, "no points of decode or reduce"),
    "relative": Figure(times.relative, "no blocks of the baseline beside other schemes"),
    "speedup": Figure(times.speedup, "no kv_ring among the schemes of decode"),
    "scaling": Figure(times.scaling, "no case was measured on several numbers of ranks", RANKS),
    "arrivals": Figure(times.arrivals, "no case was measured with several arrivals", ARRIVALS),
    "cold": Figure(times.cold, "no points of schemes"),
    "memory": Figure(times.memory, "no point tells its allocations"),
    "traffic": Figure(times.traffic, "no point tells what was sent"),
    "predicted": Figure(times.predicted, "no point carries a prediction"),
    "roofline": Figure(None, "no file of `treeattn roofline --json`"),
}


def choose_baseline(study: Study, text: str | None) -> str:
    """The scheme of relative times, by default `SUM`. Raises `ArgumentError` if it was not measured."""
    if text is None:
        return SUM
    known = study.schemes()
    try:
        spelled = text if text in known else select(text).text
    except TreeattnError:
        spelled = text
    if spelled not in known:
        raise ArgumentError(f"--baseline {text}: not among these results; choose from {', '.join(known)}")
    return spelled


def read(paths: Sequence[Path]) -> tuple[Study, list[str]]:
    """What the files hold, and what is wrong with them: lines cut off, other formats, points twice.

    Raises `ArgumentError` for a file that cannot be opened.
    """
    study, problems, tables = Study(), list[str](), []
    for path in dict.fromkeys(path.resolve() for path in paths):
        content = results.content(path)
        first = content.partition(b"\n")[0].strip()
        if first == b"{":  # results have one object in a line, the others one in a file
            problems += _take_roofline(study, path, content)
        else:
            tables.append(path)
            problems += [] if content else [f"{path}: is empty"]
    study.files = {run: path.name for path in tables for run in results.read(path).runs}
    study.results = results.read(*tables)
    problems += study.results.problems
    study.summaries = results.summarise(study.results)
    return study, problems


def _take_roofline(study: Study, path: Path, content: bytes) -> list[str]:
    try:
        measured = json.loads(content)
    except (ValueError, RecursionError) as error:
        return [one_line(f"{path}: not what `treeattn roofline --json` writes ({error}); left out")]
    if not is_roofline(measured):
        return [f"{path}: neither results of compare nor what `treeattn roofline --json` writes; left out"]
    study.rooflines[str(path)] = measured
    return []
