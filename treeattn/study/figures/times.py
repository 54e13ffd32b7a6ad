"""Figures of measured times; all from ``completion``: last exit minus first entry, on the common clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import median

from treeattn.study.compare.results import Summary
from treeattn.study.compare.schema import NULL
from treeattn.study.figures.cases import PAYLOAD, RANKS, SKEW, TOKENS, Axis, Case, Study, cases
from treeattn.study.figures.chart import Chart, Lines, Panel, Point, Rows, Series, interval
from treeattn.study.statistics import describe

__all__ = ["cold", "predicted", "relative", "scaling", "skew", "speedup", "time"]

# What is measured -> its name in titles, and the axis on which its cases lie.
_KINDS = {"decode": ("decoding step", TOKENS), "reduce": ("reduction", PAYLOAD)}

_INTERVALS = (
    "Mark: median of the iterations, blocks weighing the same. Bar: interval of that median at 95 % "
    "confidence; hollow marks have none (fewer than 6 blocks)."
)
_RATIOS = (
    "Mark: median over blocks of the ratio to the block measured beside it. Bar: interval of that median at "
    "95 % confidence; hollow marks have none (fewer than 6 blocks)."
)

Values = Callable[[Case, Summary], Point | None]


def time(study: Study) -> list[Chart]:
    """Time by scheme, over the context length or the size of the records."""
    return _over_own_axis(study, "time", "Time of a {}", "completion, µs", _completion, _INTERVALS)


def relative(study: Study) -> list[Chart]:
    """Time by scheme, divided by the time of the baseline."""

    def ratio(case: Case, summary: Summary) -> Point | None:
        return _ratio(case, summary, study.baseline)

    label = f"completion relative to {study.baseline}"
    title = f"Time of a {{}} relative to {study.baseline}"
    return _over_own_axis(study, "relative", title, label, ratio, _RATIOS, (1.0, study.baseline))


def speedup(study: Study) -> list[Chart]:
    """Time of Ring Attention divided by the time of each scheme, over the context length."""
    rings = [scheme for scheme in study.schemes() if scheme.partition(":")[0] == "kv_ring"]
    if not rings:
        return []
    ring = rings[0]

    def gain(case: Case, summary: Summary) -> Point | None:
        return _ratio(case, summary, ring, inverse=True)

    charts = [
        _lines_or_rows(case, "speedup-decode", f"Speed-up of a decoding step over {ring}",
                       f"time of {ring} / time of the scheme", gain, _RATIOS, (1.0, ring))
        for case in cases(study, "decode", TOKENS)
    ]  # fmt: skip
    return [chart for chart in charts if chart is not None]


def scaling(study: Study) -> list[Chart]:
    """Time by scheme over the number of ranks."""
    return _lines_only(study, RANKS, "scaling", "Time of a {} by ranks", "completion, µs", _completion)


def skew(study: Study) -> list[Chart]:
    """Time from the last rank's entry to the last exit, over how unevenly the ranks arrive."""

    def after_last_entry(case: Case, summary: Summary) -> Point | None:
        if "after_last_entry" not in summary.times:
            return None
        return interval(case.axis.value(summary.key), summary.times["after_last_entry"])

    title, label = "What remains of a {} after the last arrival", "last exit minus last entry, µs"
    return _lines_only(study, SKEW, "skew", title, label, after_last_entry)


def cold(study: Study) -> list[Chart]:
    """Planning and the first call beside a warm step, at the right end of each case's axis."""
    charts: list[Chart] = []
    for what, (name, axis) in _KINDS.items():
        for case in cases(study, what, axis):
            members = [m for m in case.at_end() if m.key.scheme != NULL]
            if not members:
                continue
            series = [
                Series(label, tuple(interval(row, m.times[key]) for row, m in enumerate(members)))
                for label, key in (
                    ("planning", "plan"), ("first call", "first"), ("warm step", "completion"),
                )
            ]  # fmt: skip
            names = tuple(member.key.scheme for member in members)
            charts.append(
                Rows(
                    f"cold-{what}{case.suffix}", f"Cold and warm: {name}", case.title(members[0].key),
                    (_INTERVALS, *case.notes()), names, names,
                    (Panel("µs, slowest rank (cold) and completion (warm)", tuple(series)),), "dots",
                )
            )  # fmt: skip
    return charts


def predicted(study: Study) -> list[Chart]:
    """Predicted against measured time, where points carry a prediction (``predicted``, µs)."""
    charts: list[Chart] = []
    for what, (name, axis) in _KINDS.items():
        for case in cases(study, what, axis):
            series = tuple(
                Series(scheme, tuple(
                    Point(m.times["completion"].median, float(m.facts["predicted"]))
                    for m in members if isinstance(m.facts.get("predicted"), int | float)
                ))
                for scheme, members in case.by_scheme()
            )  # fmt: skip
            series = tuple(one for one in series if one.points)
            if series:
                charts.append(
                    Lines(
                        f"predicted-{what}{case.suffix}", f"Predicted and measured time of a {name}",
                        case.title(), case.notes(), "measured completion (median), µs", "predicted, µs",
                        series, joined=False, intervals=False, reference="diagonal",
                    )
                )  # fmt: skip
    return charts


def _completion(case: Case, summary: Summary) -> Point | None:
    return interval(case.axis.value(summary.key), summary.times["completion"])


def _ratio(case: Case, summary: Summary, baseline: str, inverse: bool = False) -> Point | None:
    """The median of the ratios of blocks that were measured side by side, with its interval.

    Schemes are interleaved within a repetition, so what the machine did meanwhile divides out.
    """
    if summary.key.scheme == NULL:
        return None
    mine, other = (_blocks(case.study, summary, scheme) for scheme in (summary.key.scheme, baseline))
    ratios = [mine[block] / other[block] for block in mine if block in other]
    if not ratios:
        return None
    return interval(
        case.axis.value(summary.key), describe([[1 / ratio if inverse else ratio] for ratio in ratios])
    )


def _blocks(study: Study, summary: Summary, scheme: str) -> dict[tuple[str, int, int], float]:
    """(run, launch, repetition) -> median completion, of `scheme` in the case and version of `summary`."""
    found = study.blocks[(summary.key.case, summary.version)]
    return {
        (point.run, point.launch, point.repetition): median(point.samples["completion"])
        for point in found
        if point.key.scheme == scheme
    }


def _over_own_axis(
    study: Study, name: str, title: str, label: str, values: Values, note: str,
    reference: tuple[float, str] | None = None,
) -> list[Chart]:  # fmt: skip
    charts = [
        _lines_or_rows(case, f"{name}-{what}", title.format(kind), label, values, note, reference)
        for what, (kind, axis) in _KINDS.items()
        for case in cases(study, what, axis)
    ]
    return [chart for chart in charts if chart is not None]


def _lines_or_rows(
    case: Case, name: str, title: str, label: str, values: Values, note: str,
    reference: tuple[float, str] | None,
) -> Chart | None:  # fmt: skip
    """Lines over the axis of the case; where all points are in one place, rows, the smallest value first."""
    if len(case.places()) > 1:
        return _lines(case, name, title, label, values, note, reference)
    found = [(values(case, m), m) for m in case.members]
    rows = sorted(((p, m) for p, m in found if p is not None), key=lambda row: row[0].value)
    if not rows:
        return None
    names = tuple(member.key.scheme for _, member in rows)
    points = tuple(point._replace(x=row) for row, (point, _) in enumerate(rows))
    panel = Panel(label, (Series(label, points),), reference=reference)
    key = rows[0][1].key
    return Rows(
        name + case.suffix, title, case.title(key), (note, *case.notes()), names, names, (panel,), "dots"
    )


def _lines_only(study: Study, axis: Axis, name: str, title: str, label: str, values: Values) -> list[Chart]:
    charts = [
        _lines(case, f"{name}-{what}", title.format(kind), label, values, _INTERVALS, None)
        for what, (kind, _) in _KINDS.items()
        for case in cases(study, what, axis)
        if len(case.places()) > 1
    ]
    return [chart for chart in charts if chart is not None]


def _lines(
    case: Case, name: str, title: str, label: str, values: Values, note: str,
    reference: tuple[float, str] | None,
) -> Chart | None:  # fmt: skip
    series = tuple(
        Series(scheme, _known(values(case, summary) for summary in members))
        for scheme, members in case.by_scheme()
    )
    series = tuple(one for one in series if one.points)
    if not series:
        return None
    return Lines(
        name + case.suffix, title, case.title(), (note, *case.notes()), case.axis.label, label, series,
        x_log=min(case.places()) > 0, ticks="tokens" if case.axis is TOKENS else "plain", reference=reference,
    )  # fmt: skip


def _known(points: Iterable[Point | None]) -> tuple[Point, ...]:
    return tuple(point for point in points if point is not None)
