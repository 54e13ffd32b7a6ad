"""Figures of measured times; all from ``completion``: last exit minus first entry, on the common clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import median

from treeattn.study.compare.results import Summary
from treeattn.study.compare.schema import NULL, SUM
from treeattn.study.figures.axes import brief
from treeattn.study.figures.cases import KINDS, RANKS, SKEW, TOKENS, Axis, Case, Study, cases, left_out
from treeattn.study.figures.chart import Chart, Lines, Panel, Point, Rows, Series, interval
from treeattn.study.statistics import describe

__all__ = ["cold", "over", "predicted", "relative", "scaling", "skew", "speedup", "time"]

_INTERVALS = (
    "Mark: median of the iterations, blocks weighing the same. Line through it: interval of that median at "
    "95 % confidence; hollow marks have none (fewer than 6 blocks)."
)
_RATIOS = (
    "Mark: median over blocks of the ratio to the block measured beside it. Line through it: interval of "
    "that median at 95 % confidence; hollow marks have none (fewer than 6 blocks)."
)
#: Rows show so many places of an axis beside each other; more become lines.
_MOST_PANELS = 3

Value = Callable[[Summary], Point | None]


def time(study: Study) -> list[Chart]:
    """Time by scheme, over the context length or the size of the records."""
    return [
        chart
        for case in cases(study)
        for chart in by_scheme(
            case, f"time-{case.what}", f"Time of a {KINDS[case.what][0]}", "completion, µs", _completion,
            _INTERVALS,
        )
    ]  # fmt: skip


def relative(study: Study) -> list[Chart]:
    """Time by scheme, divided by the time of the baseline."""
    against = "SUM" if study.baseline == SUM else study.baseline
    return [
        chart
        for case in cases(study)
        for chart in by_scheme(
            case, f"relative-{case.what}", f"Time of a {KINDS[case.what][0]} relative to {study.baseline}",
            f"completion, × {against}", lambda summary: _ratio(study, summary, study.baseline), _RATIOS, 1.0,
        )
    ]  # fmt: skip


def speedup(study: Study) -> list[Chart]:
    """Time of Ring Attention divided by the time of each scheme, over the context length."""
    ring = next((scheme for scheme in study.schemes() if scheme.partition(":")[0] == "kv_ring"), None)
    return [
        chart
        for case in cases(study, TOKENS)
        if case.what == "decode" and ring is not None
        for chart in by_scheme(
            case, "speedup-decode", f"Speed-up of a decoding step over {ring}",
            f"time of {ring} / time of the scheme",
            lambda summary: _ratio(study, summary, ring, inverse=True), _RATIOS, 1.0,
        )
    ]  # fmt: skip


def scaling(study: Study) -> list[Chart]:
    """Time by scheme over the number of ranks."""
    return over(study, RANKS, "scaling", "Time of a {} by ranks", "completion, µs", _completion)


def skew(study: Study) -> list[Chart]:
    """Time from the last rank's entry to the last exit, over how unevenly the ranks arrive."""
    title, label = "What remains of a {} after the last arrival", "last exit minus last entry, µs"
    return over(study, SKEW, "skew", title, label, lambda summary: _time(summary, "after_last_entry"))


def over(study: Study, axis: Axis, name: str, title: str, label: str, value: Value) -> list[Chart]:
    """Lines over `axis`, of cases that have several places on it; the others are named."""
    missing = left_out(study, axis)
    return [
        chart
        for case in cases(study, axis)
        if len(case.places()) > 1
        for chart in lines(
            case, f"{name}-{case.what}", title.format(KINDS[case.what][0]), label, value, _INTERVALS, missing
        )
    ]  # fmt: skip


def cold(study: Study) -> list[Chart]:
    """Planning and the first call beside a warm step, at the right end of each case's axis."""
    charts: list[Chart] = []
    for case in cases(study):
        members = [m for m in case.at_end() if m.key.scheme != NULL]
        series = [
            Series(label, tuple(interval(row, m.times[key]) for row, m in enumerate(members)))
            for label, key in (("planning", "plan"), ("first call", "first"), ("warm step", "completion"))
        ]
        panel = Panel("µs, slowest rank (cold) and completion (warm)", tuple(series))
        title = f"Cold and warm: {KINDS[case.what][0]}"
        names = tuple(member.key.scheme for member in members)
        charts += rows(case, f"cold-{case.what}", title, names, (panel,), _INTERVALS)
    return charts


def predicted(study: Study) -> list[Chart]:
    """Predicted against measured time, where points carry a prediction (``predicted``, µs)."""
    charts: list[Chart] = []
    for case in cases(study):
        series = tuple(
            Series(scheme, tuple(
                Point(m.times["completion"].median, float(m.facts["predicted"]))
                for m in members if m.facts["predicted"] is not None
            ))
            for scheme, members in case.by_scheme()
        )  # fmt: skip
        series = tuple(one for one in series if one.points)
        title = f"Predicted and measured time of a {KINDS[case.what][0]}"
        note = "Line: the prediction is right. Above it: it is too slow."
        if series:
            charts.append(
                Lines(
                    f"predicted-{case.what}{case.suffix}", title, case.title(), (note, *case.notes()),
                    "measured completion (median), µs", "predicted, µs", series, intervals=False,
                    diagonal=True,
                )
            )  # fmt: skip
    return charts


def by_scheme(
    case: Case, name: str, title: str, label: str, value: Value, note: str, reference: float | None = None
) -> list[Chart]:
    """Rows from the smallest value, with a panel for each of few places on the axis; lines over many."""
    places = case.places()
    if len(places) > _MOST_PANELS:
        return lines(case, name, title, label, value, note, reference=reference)
    found = [(m.key.scheme, case.axis.value(m.key), value(m)) for m in case.members]
    known = sorted(((place, p.value, s, p) for s, place, p in found if p is not None), reverse=True)
    names = tuple(dict.fromkeys(scheme for *_, scheme, _ in known))[::-1]
    panels = []
    for place in places:
        points = sorted(p._replace(x=names.index(s)) for at, _, s, p in known if at == place)
        heading = f"{brief(place)} {'tokens' if case.axis is TOKENS else 'bytes'}" if len(places) > 1 else ""
        panels.append(Panel(label, (Series(label, tuple(points)),), heading, reference=reference))
    return rows(case, name, title, names, tuple(panels), note)


def rows(
    case: Case, name: str, title: str, names: tuple[str, ...], panels: tuple[Panel, ...], note: str,
    exact: bool = False,
) -> list[Chart]:  # fmt: skip
    """One row for each scheme, if there are any. A panel without a title shows the end of the axis."""
    end = case.at_end()[0].key
    where = case.title(None if panels[0].title else end)
    notes = note, *case.notes()
    return [Rows(name + case.suffix, title, where, notes, names, names, panels, exact)] if names else []


def lines(
    case: Case, name: str, title: str, label: str, value: Value, note: str,
    missing: tuple[str, ...] = (), reference: float | None = None, intervals: bool = True,
) -> list[Chart]:  # fmt: skip
    """One line for each scheme over the axis of the case."""
    series = tuple(Series(scheme, _known(case, members, value)) for scheme, members in case.by_scheme())
    chart = Lines(
        name + case.suffix, title, case.title(), (note, *case.notes()), case.axis.label, label,
        tuple(one for one in series if one.points), x_log=min(case.places()) > 0, intervals=intervals,
        ticks="tokens" if case.axis is TOKENS else "plain", reference=reference, left_out=missing,
    )  # fmt: skip
    return [chart] if chart.series else []


def _known(case: Case, members: Iterable[Summary], value: Value) -> tuple[Point, ...]:
    points = ((case.axis.value(member.key), value(member)) for member in members)
    return tuple(point._replace(x=x) for x, point in points if point is not None)


def _time(summary: Summary, series: str) -> Point | None:
    return interval(0, summary.times[series]) if series in summary.times else None


def _completion(summary: Summary) -> Point | None:
    return _time(summary, "completion")


def _ratio(study: Study, summary: Summary, baseline: str, inverse: bool = False) -> Point | None:
    """The median of the ratios of blocks that were measured side by side, with its interval.

    Schemes are interleaved within a repetition, so what the machine did meanwhile divides out.
    """
    if summary.key.scheme == NULL:
        return None
    mine, other = (_blocks(study, summary, scheme) for scheme in (summary.key.scheme, baseline))
    ratios = [mine[block] / other[block] for block in mine if block in other]
    return interval(0, describe([[1 / r if inverse else r] for r in ratios])) if ratios else None


def _blocks(study: Study, summary: Summary, scheme: str) -> dict[tuple[str, int, int], float]:
    """(run, launch, repetition) -> median completion, of `scheme` in the case and version of `summary`."""
    return {
        (point.run, point.launch, point.repetition): median(point.samples["completion"])
        for point in study.blocks[(summary.key.case, summary.version)]
        if point.key.scheme == scheme
    }
