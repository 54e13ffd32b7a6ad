"""The answer of ``treeattn compare``: which schemes are faster than a baseline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from treeattn.report import Column, Report
from treeattn.study.compare.answer import FEWEST, LOOKS, UNTOLD, Answer, answers
from treeattn.study.compare.results import Results, Summary, compared_series, summarise
from treeattn.study.compare.schema import Key


def answer(rows: Iterable[Summary], measured: Results, baseline: str | None) -> None:
    """Give each summary of one case the series that it is compared by, and its answer or None."""
    of_case = {row.key: row for row in rows}
    series = compared_series(of_case.values())
    used = [
        point
        for point in measured.points
        if point.key in of_case and measured.version(point) == of_case[point.key].version
    ]
    early = any(measured.runs[run].options.get("stop_early") for run in {point.run for point in used})
    found = {one.key: one for one in answers(used, series, baseline, early)}
    for row in of_case.values():
        row.facts.update(compared_by=series, answer=found.get(row.key), stops_early=early)


def answered(case: Results, baseline: str | None) -> set[Key]:
    """Keys of one case that need no further block: those with a verdict, and then all if none lacks it."""
    rows = summarise(case)
    answer(rows, case, baseline)
    asked = [row.facts["answer"] for row in rows if row.facts["answer"]]
    told = {one.key for one in asked if one.verdict != UNTOLD}
    return {row.key for row in rows} if asked and len(told) == len(asked) else told


def show(made: Report, rows: Sequence[Summary]) -> None:
    """Add the table of one case, or the line that says what it lacks."""
    found: list[Answer] = [row.facts["answer"] for row in rows if row.facts.get("answer")]
    if not found:
        return
    baselines = " or ".join(dict.fromkeys(one.baseline for one in found))
    early = any(row.facts["stops_early"] for row in rows)
    if max(one.blocks for one in found) < (LOOKS[0] if early else FEWEST):
        made.line(f"faster than {baselines}? --repetitions {LOOKS[0] if early else FEWEST} at least can tell")
        return
    made.line(f"\nagainst {baselines}, within each repetition")
    made.table(sorted(found, key=lambda one: one.ratio), [
        Column("scheme", lambda one: one.key.label, words=True),
        Column("ratio", "ratio", ".2f"),
        Column("95 % interval", lambda one: None if one.low is None else f"{one.low:.2f} to {one.high:.2f}"),
        Column("p", "p", ".2g"),
        Column("verdict", "verdict", words=True),
        Column("blocks", "blocks", wide=not early),
    ])  # fmt: skip
    if disagree := [one.key.label for one in found if one.disagree]:
        made.line(f"launches disagree, one alone says the opposite of all: {', '.join(disagree)}")
    if max(one.launches for one in found) == 1:
        made.line(
            "of one launch: what only another launch changes, such as the cores of ranks, is in no interval "
            "(--launch 2)"
        )
    if early:
        made.line(
            "blocks ended with the answer: it was looked for after 8, 16, 32 .. of them, and p and intervals "
            "hold for all looks together"
        )
