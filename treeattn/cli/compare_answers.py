"""The answer of ``treeattn compare``: which schemes are faster than a baseline."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from treeattn.report import Column, Report
from treeattn.study.compare.answer import FEWEST, Answer, answers
from treeattn.study.compare.results import Summary, compared_series
from treeattn.study.compare.schema import Point


def answer(
    rows: Iterable[Summary], points: Iterable[Point], version: Callable[[Point], str], baseline: str | None
) -> None:
    """Give each summary of one case the series that it is compared by, and its answer or None."""
    of_case = {row.key: row for row in rows}
    series = compared_series(of_case.values())
    used = (
        point for point in points if point.key in of_case and version(point) == of_case[point.key].version
    )
    found = {one.key: one for one in answers(used, series, baseline)}
    for row in of_case.values():
        row.facts.update(compared_by=series, answer=found.get(row.key))


def show(made: Report, rows: Iterable[Summary]) -> None:
    """Add the table of one case, or the line that says what it lacks."""
    found: list[Answer] = [row.facts["answer"] for row in rows if row.facts.get("answer")]
    if not found:
        return
    baselines = " or ".join(dict.fromkeys(one.baseline for one in found))
    if max(one.blocks for one in found) < FEWEST:
        made.line(f"faster than {baselines}? --repetitions {FEWEST} at least can tell")
        return
    made.line(f"\nagainst {baselines}, within each repetition")
    made.table(sorted(found, key=lambda one: one.ratio), [
        Column("scheme", lambda one: one.key.label, words=True),
        Column("ratio", "ratio", ".2f"),
        Column("95 % interval", lambda one: None if one.low is None else f"{one.low:.2f} to {one.high:.2f}"),
        Column("p", "p", ".2g"),
        Column("verdict", "verdict", words=True),
        Column("blocks", "blocks", wide=True),
    ])  # fmt: skip
