"""Figures of what was measured: times, memory, and bytes and messages by tier.

A time is last exit minus first entry on the common clock, or minus last entry where entries are further apart
than a tenth of the fastest scheme's time (`results.compared_series`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Literal

from treeattn.study.compare.results import Summary
from treeattn.study.compare.schema import NULL, SUM
from treeattn.study.figures.cases import ARRIVALS, RANKS, TOKENS, Case, left_out
from treeattn.study.figures.chart import Chart, Lines, Panel, Point, Rows, Series, interval
from treeattn.study.figures.pictures import brief
from treeattn.study.figures.style import in_order
from treeattn.study.statistics import Statistics, describe

_LINE = (
    "Line through it: interval of that median at 95 % confidence; hollow marks have none (fewer than 6 "
    "blocks)."
)
_INTERVALS = f"Mark: median of the iterations, blocks weighing the same. {_LINE}"
_RATIOS = f"Mark: median over blocks of the ratio to the block measured beside it. {_LINE}"

# What a time is, by the series that it is taken from.
_SERIES = {"completion": "completion", "after_last_entry": "time from the last entry"}

#: Rows show so many places of an axis beside each other; more become lines.
_MOST_PANELS = 3

#: What stands around a chart: the name of its file, its title and a note. {} is what is measured.
Words = tuple[str, str, str]
Value = Callable[[Summary], Point | None]


def time(case: Case) -> list[Chart]:
    """Time by scheme, over the context length or the size of the records."""
    return by_scheme(
        case, ("time-{}", "Time of a {}", _INTERVALS), f"{_SERIES[case.series]}, µs", _compared(case)
    )


def relative(case: Case) -> list[Chart]:
    """Time by scheme, divided by the time of the baseline."""
    baseline = case.study.baseline
    words = "relative-{}", f"Time of a {{}} relative to {baseline}", _RATIOS
    label = f"{_SERIES[case.series]}, × {'SUM' if baseline == SUM else baseline}"
    return by_scheme(case, words, label, lambda summary: _ratio(case, summary, baseline), 1.0)


def speedup(case: Case) -> list[Chart]:
    """Time of Ring Attention divided by the time of each scheme, over the context length."""
    ring = next((name for name in case.study.schemes() if name.partition(":")[0] == "kv_ring"), None)
    if ring is None or case.what != "decode":
        return []
    words, label = (
        ("speedup-{}", f"Speed-up of a {{}} over {ring}", _RATIOS),
        f"time of {ring} / time of the scheme",
    )
    return by_scheme(case, words, label, lambda summary: _ratio(case, summary, ring, inverse=True), 1.0)


def scaling(case: Case) -> list[Chart]:
    """Time by scheme over the number of ranks."""
    words = "scaling-{}", "Time of a {} by ranks", _INTERVALS
    return lines(case, words, f"{_SERIES[case.series]}, µs", _compared(case))


def arrivals(case: Case) -> list[Chart]:
    """Time from the last rank's entry to the last exit, over how unevenly the ranks arrive."""
    words = "arrivals-{}", "What remains of a {} after the last arrival", _INTERVALS
    return lines(case, words, "last exit minus last entry, µs", lambda one: _time(one, "after_last_entry"))


def cold(case: Case) -> list[Chart]:
    """Planning and the first call beside a warm step, at the right end of the axis."""
    members = [m for m in case.at_end() if m.key.scheme != NULL]
    series = tuple(
        Series(label, tuple(interval(row, m.times[key]) for row, m in enumerate(members)))
        for label, key in (("planning", "plan"), ("first call", "first"), ("warm step", "completion"))
    )
    panel = Panel("µs, slowest rank (cold) and completion (warm)", series)
    return rows(case, ("cold-{}", "Cold and warm: {}", _INTERVALS), [m.key.label for m in members], (panel,))


def predicted(case: Case) -> list[Chart]:
    """Predicted against measured time, where points carry a prediction."""
    known = [m for m in case.members if m.facts["estimate"] is not None]
    points = [(m.key.label, _against(m.times[case.series], m)) for m in known]
    series = tuple(
        Series(scheme, tuple(sorted(point for name, point in points if name == scheme)))
        for scheme in in_order(name for name, _ in points)
    )
    note = (
        "Diagonal: the prediction is right. Above it: it is too slow. Lines through a mark: interval of the "
        "measured median at 95 % confidence, and that of the prediction."
    )
    around = case.around("predicted-{}", "Predicted and measured time of a {}", note)
    labels = f"measured {_SERIES[case.series]} (median), µs", "predicted, µs"
    return [Lines(*around, *labels, series, intervals=False, diagonal=True)] if series else []


def _against(measured: Statistics, summary: Summary) -> Point:
    known = summary.facts["estimate"]
    return Point(measured.median, known.time, known.low, known.high, measured.low, measured.high)


def by_scheme(
    case: Case, words: Words, label: str, value: Value, reference: float | None = None
) -> list[Chart]:
    """Rows from the smallest value, with a panel for each of few places on the axis; lines over many."""
    places = case.places()
    if len(places) > _MOST_PANELS:
        return lines(case, words, label, value, reference)
    known = [(case.axis.value(m.key), p, m.key.label) for m in case.members if (p := value(m)) is not None]
    known.sort(key=lambda of: (of[0], of[1].value), reverse=True)
    names = tuple(dict.fromkeys(scheme for _, _, scheme in known))[::-1]
    panels = []
    for place in places:
        points = sorted(p._replace(x=names.index(scheme)) for at, p, scheme in known if at == place)
        heading = f"{brief(place)} {'tokens' if case.axis is TOKENS else 'bytes'}" if len(places) > 1 else ""
        panels.append(Panel(label, (Series(label, tuple(points)),), heading, reference=reference))
    return rows(case, words, names, tuple(panels))


def rows(
    case: Case, words: Words, names: Sequence[str], panels: tuple[Panel, ...], exact: bool = False
) -> list[Chart]:
    """One row for each scheme, if there are any. A panel without a title shows the end of the axis."""
    around = case.around(*words, None if panels[0].title else case.at_end()[0].key)
    return [Rows(*around, tuple(names), panels, exact)] if names else []


def lines(
    case: Case, words: Words, label: str, value: Value, reference: float | None = None, intervals: bool = True
) -> list[Chart]:
    """One line for each scheme, if there are several places on the axis of the case."""
    places, series = case.places(), []
    for scheme, members in case.by_scheme():
        known = ((case.axis.value(member.key), value(member)) for member in members)
        points = tuple(point._replace(x=x) for x, point in known if point is not None)
        series += [Series(scheme, points)] if points else []
    if len(places) < 2 or not series:
        return []
    ticks: Literal["tokens", "plain"] = "tokens" if case.axis is TOKENS else "plain"
    missing = left_out(case.study, case.axis) if case.axis in (RANKS, ARRIVALS) else ()
    return [
        Lines(*case.around(*words), case.axis.label, label, tuple(series), places[0] > 0, intervals, ticks,
              reference, left_out=missing)
    ]  # fmt: skip


def _time(summary: Summary, series: str) -> Point | None:
    return interval(0, summary.times[series]) if series in summary.times else None


def _compared(case: Case) -> Value:
    series = case.series
    return lambda summary: _time(summary, series)


def _ratio(case: Case, summary: Summary, baseline: str, inverse: bool = False) -> Point | None:
    """The median of the ratios of blocks that were measured side by side, with its interval.

    Schemes are interleaved within a repetition, so what the machine did meanwhile divides out.
    """
    if summary.key.scheme == NULL:
        return None
    mine, other = (_blocks(case, summary, scheme) for scheme in (summary.key.scheme, baseline))
    ratios = [mine[block] / other[block] for block in mine if block in other]
    return interval(0, describe([[1 / r if inverse else r] for r in ratios])) if ratios else None


def _blocks(case: Case, summary: Summary, scheme: str) -> dict[tuple[str, int, int], float]:
    """(run, launch, repetition) -> median time, of `scheme` over the transport, in the case and of the
    version of `summary`."""
    series = case.series
    return {
        (point.run, point.launch, point.repetition): median(point.samples[series])
        for point in case.study.blocks[(summary.key.case, summary.version)]
        if (point.key.scheme, point.key.transport) == (scheme, summary.key.transport)
    }


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
