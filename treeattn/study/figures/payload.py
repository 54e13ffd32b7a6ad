"""Figures of what a scheme costs besides time: memory, and bytes and messages by tier."""

from __future__ import annotations

from typing import Any

from treeattn.study.compare.results import Summary
from treeattn.study.compare.schema import NULL, SUM
from treeattn.study.figures.cases import Case
from treeattn.study.figures.chart import Chart, Panel, Point, Series
from treeattn.study.figures.times import lines, rows

_ALLOCATIONS = (
    "Allocations of Python and NumPy on the worst rank, without the MPI library's own and without the "
    "caller's cache. Held: left allocated by planning and a first step. Step peak: added by a further step."
)
_SENT = "Of all ranks in one step, as handed to MPI. Intra: within a node. Inter: between nodes."


def memory(case: Case) -> list[Chart]:
    """Bytes that a scheme holds and that a step adds; and their sum over the context length."""
    members = [m for m in case.at_end() if _peak(m) is not None]
    series = tuple(
        Series(label, tuple(Point(row, float(m.facts[fact])) for row, m in enumerate(members)))
        for label, fact in (("held between steps", "held"), ("step peak, on top", "step_peak"))
    )
    words = "memory-{}", "Memory of a {}, one rank", _ALLOCATIONS
    growth = "memory-{}-growth", "Peak memory of a {}, one rank", _ALLOCATIONS
    return [
        *rows(case, words, [m.key.label for m in members], (Panel("bytes", series),), exact=True),
        *lines(case, growth, "held and step peak together, bytes", _peak, intervals=False),
    ]


def _peak(summary: Summary) -> Point | None:
    held, step = summary.facts["held"], summary.facts["step_peak"]
    return None if held is None or step is None else Point(0, float(held + step))


def traffic(case: Case) -> list[Chart]:
    """Bytes and messages within and between nodes, of one step."""
    members = [m for m in case.at_end() if m.key.scheme not in (SUM, NULL)]
    sent = [_told(member.facts["sent"]) for member in members]
    panels = _tiers("bytes", 1, sent), _tiers("messages", 0, sent)
    names = [m.key.label for m in members if any(sent)]
    return rows(case, ("traffic-{}", "What a {} sends", _SENT), names, panels, exact=True)


def _told(sent: dict[str, Any] | None) -> dict[str, Any]:
    """Tier -> [messages, bytes] as far as it is known: of some baselines that is the sum alone."""
    if not sent:
        return {}
    return {"unknown": sent["unknown"]} if "unknown" in sent else sent


def _tiers(label: str, index: int, sent: list[dict[str, Any]]) -> Panel:
    """index: into the pairs of `sent`, one for each row; None in them is for the library alone to know.
    Both panels of a figure have the tiers in which any row sends something."""
    present = {tier for of_row in sent for tier, pair in of_row.items() if any(pair)}
    hidden = [not of_row or any(pair[index] is None for pair in of_row.values()) for of_row in sent]
    series = []
    for tier, words in (("intra", "intra"), ("inter", "inter"), ("unknown", "both together")):
        points = tuple(
            Point(row, float(of_row[tier][index]))
            for row, of_row in enumerate(sent)
            if tier in of_row and not hidden[row]
        )
        series += [Series(words, points)] if tier in present else []
    absent = tuple((row, "the library decides") for row, hides in enumerate(hidden) if hides)
    return Panel(label, tuple(series), absent=absent)
