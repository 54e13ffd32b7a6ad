"""Figures of what a scheme costs besides time: memory, and bytes and messages by tier."""

from __future__ import annotations

from typing import Any

from treeattn.study.compare.results import Summary
from treeattn.study.compare.schema import NULL, SUM
from treeattn.study.figures.cases import PAYLOAD, TOKENS, Case, Study, cases
from treeattn.study.figures.chart import Chart, Lines, Panel, Point, Rows, Series

__all__ = ["memory", "traffic"]

_KINDS = {"decode": ("decoding step", TOKENS), "reduce": ("reduction", PAYLOAD)}

_ALLOCATIONS = (
    "Allocations of Python and NumPy on the worst rank, without the MPI library's own and without the "
    "caller's cache. Held: left allocated by planning and a first step. Step peak: added by a further step."
)
_SENT = "Of all ranks in one step, as handed to MPI. Intra: within a node. Inter: between nodes."


def memory(study: Study) -> list[Chart]:
    """Bytes that a scheme holds and that a step adds; and their sum over the context length."""
    charts: list[Chart] = []
    for what, (name, axis) in _KINDS.items():
        for case in cases(study, what, axis):
            members = [m for m in case.at_end() if _peak(m) is not None]
            if members:
                charts.append(_memory_rows(case, what, name, members))
            if len(case.places()) > 1:
                charts += _memory_lines(case, what, name)
    return charts


def _memory_rows(case: Case, what: str, name: str, members: list[Summary]) -> Chart:
    series = tuple(
        Series(label, tuple(Point(row, float(m.facts[fact])) for row, m in enumerate(members)))
        for label, fact in (("held between steps", "held"), ("step peak, on top", "step_peak"))
    )
    names = tuple(member.key.scheme for member in members)
    return Rows(
        f"memory-{what}{case.suffix}", f"Memory of a {name}, one rank", case.title(members[0].key),
        (_ALLOCATIONS, *case.notes()), names, names, (Panel("bytes", series),), "bars",
    )  # fmt: skip


def _memory_lines(case: Case, what: str, name: str) -> list[Chart]:
    series = []
    for scheme, members in case.by_scheme():
        peaks = [(case.axis.value(m.key), _peak(m)) for m in members]
        points = tuple(Point(x, peak) for x, peak in peaks if peak is not None)
        series += [Series(scheme, points)] if points else []
    if not series:
        return []
    return [
        Lines(
            f"memory-{what}-growth{case.suffix}", f"Peak memory of a {name}, one rank", case.title(),
            (_ALLOCATIONS, *case.notes()), case.axis.label, "held and step peak together, bytes",
            tuple(series), intervals=False, ticks="tokens" if case.axis is TOKENS else "plain",
        )
    ]  # fmt: skip


def _peak(summary: Summary) -> float | None:
    held, step = summary.facts["held"], summary.facts["step_peak"]
    return None if held is None or step is None else float(held + step)


def traffic(study: Study) -> list[Chart]:
    """Bytes and messages within and between nodes, of one step."""
    charts: list[Chart] = []
    for what, (name, axis) in _KINDS.items():
        for case in cases(study, what, axis):
            members = [m for m in case.at_end() if m.key.scheme not in (SUM, NULL)]
            if any(member.facts.get("sent") for member in members):
                charts.append(_traffic_rows(case, what, name, members))
    return charts


def _traffic_rows(case: Case, what: str, name: str, members: list[Summary]) -> Chart:
    names = tuple(member.key.scheme for member in members)
    sent = [_told(member.facts.get("sent")) for member in members]
    return Rows(
        f"traffic-{what}{case.suffix}", f"What a {name} sends", case.title(members[0].key),
        (_SENT, *case.notes()), names, names, (_tiers("bytes", 1, sent), _tiers("messages", 0, sent)), "bars",
    )  # fmt: skip


def _told(sent: dict[str, Any] | None) -> dict[str, Any]:
    """Tier -> [messages, bytes] as far as it is known: of some baselines that is the sum alone."""
    if not sent:
        return {}
    return {"unknown": sent["unknown"]} if "unknown" in sent else sent


def _tiers(label: str, index: int, sent: list[dict[str, Any]]) -> Panel:
    """index: into the pairs of `sent`, one for each row; None in them is for the library alone to know."""
    present = {tier for of_row in sent for tier in of_row}
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
