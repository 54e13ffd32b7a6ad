"""The roofline: how close attention on the processor comes to the memory that it reads."""

from __future__ import annotations

from typing import Any

from treeattn.study.figures.cases import Study
from treeattn.study.figures.chart import Chart, Panel, Point, Rows, Series

__all__ = ["is_roofline", "roofline"]

_ROW = {"dtype": str, "group": int, "threads": int, "tokens": int,
        "percent_of_read_rate": float, "percent_of_bound": float}  # fmt: skip

_NOTE = (
    "Read rate: of one core, measured in turn with the attention. Bound: the slower of reading and "
    "multiplying, with as many threads. Group: query heads per KV head; with many, multiplying is slower."
)


def is_roofline(measured: Any) -> bool:
    """Whether this has the parts of what ``treeattn roofline --json`` writes that are drawn here."""
    if not isinstance(measured, dict) or not isinstance(measured.get("rows"), list) or not measured["rows"]:
        return False
    return isinstance(measured.get("read_rate_gb_s"), float) and all(
        isinstance(row, dict) and all(isinstance(row.get(name), kind) for name, kind in _ROW.items())
        for row in measured["rows"]
    )


def roofline(study: Study) -> list[Chart]:
    """Percent of the read rate and of the bound, by length, type and query heads per KV head."""
    charts: list[Chart] = []
    for number, measured in enumerate(study.rooflines.values(), 1):
        suffix = f"-{number}" if len(study.rooflines) > 1 else ""
        charts.append(_chart(measured, suffix))
    return charts


def _chart(measured: dict[str, Any], suffix: str) -> Chart:
    rows = sorted(measured["rows"], key=lambda row: [row[name] for name in list(_ROW)[:4]])
    series = tuple(
        Series(label, tuple(Point(place, row[name]) for place, row in enumerate(rows)))
        for label, name in (
            ("of the read rate", "percent_of_read_rate"), ("of the bound", "percent_of_bound"),
        )
    )  # fmt: skip
    labels = tuple(
        "{dtype}, group {group}\n{tokens:,} tokens, {threads} thread".format(**row)
        + "s" * (row["threads"] > 1)
        for row in rows
    )
    panel = Panel("%", series, log=False, reference=(100.0, "limit"))
    software = measured.get("software", {})
    case = f"read rate {measured['read_rate_gb_s']:.1f} GB/s · {measured.get('isa', 'unknown instructions')}"
    source = f"{measured.get('cpu', 'unknown processor')}, git {str(software.get('git'))[:12]}."
    return Rows(
        f"roofline{suffix}", "Attention against what the machine reads", case, (_NOTE, source), labels,
        tuple(row["dtype"] for row in rows), (panel,), "bars",
    )  # fmt: skip
