"""The roofline: how close attention comes to the memory that it reads."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import msgspec

from treeattn.study.figures.cases import Study
from treeattn.study.figures.chart import Chart, Panel, Point, Rows, Series


class _Kind(NamedTuple):
    """rate: the limit's name in the file. percents: legend -> field of a row. order: fields that tell rows
    apart."""

    rate: str
    percents: dict[str, str]
    order: tuple[str, ...]
    note: str


_KINDS = (
    _Kind(
        "read_rate_gb_s",
        {"of the read rate": "percent_of_read_rate", "of the bound": "percent_of_bound"},
        ("dtype", "group", "tokens", "threads"),
        "Group: query heads per KV head. Read rate: of one core, measured in turn with the attention. Bound: "
        "the slower of reading and multiplying, with as many threads.",
    ),
    _Kind(
        "copy_rate_gb_s",
        {"of the copy rate": "percent_of_copy_rate"},
        ("dtype", "group", "tokens"),
        "Group: query heads per KV head. Copy rate: of the memory, read and written, measured in turn "
        "with the attention, which starts with a cold L2 cache.",
    ),
)


def _kind(measured: Any) -> _Kind | None:
    for kind in _KINDS:
        numbers = [(name, float) for name in (*kind.percents.values(), *kind.order[1:])]
        row = msgspec.defstruct("Row", [("dtype", str), *numbers])
        rows = Annotated[list[row], msgspec.Meta(min_length=1)]  # type: ignore[valid-type]
        try:
            msgspec.convert(measured, msgspec.defstruct("File", [(kind.rate, float), ("rows", rows)]))
        except msgspec.ValidationError:
            continue
        return kind
    return None


def is_roofline(measured: Any) -> bool:
    """Whether this has the parts of what ``treeattn roofline --json`` writes that are drawn here."""
    return _kind(measured) is not None


def roofline(study: Study) -> list[Chart]:
    """Percent of the limit, by length, type and query heads per KV head; a figure for each file."""
    several = len(study.rooflines) > 1
    return [
        _chart(measured, kind, f"-{number}" if several else "")
        for number, measured in enumerate(study.rooflines.values(), 1)
        if (kind := _kind(measured)) is not None
    ]


def _chart(measured: dict[str, Any], kind: _Kind, suffix: str) -> Chart:
    rows = sorted(measured["rows"], key=lambda row: [row[name] for name in kind.order])
    series = tuple(
        Series(label, tuple(Point(place, row[name]) for place, row in enumerate(rows)))
        for label, name in kind.percents.items()
    )
    axis = "%" if len(series) > 1 else f"% {series[0].label}"
    panel = Panel(axis, series, log=False, reference=100.0)
    machine = f"{measured.get('cpu', 'unknown processor')}"
    if isinstance(measured.get("device"), dict):
        machine = "{name}, driver {driver}".format(**{"name": "?", "driver": "?"} | measured["device"])
    rate = f"{kind.rate.partition('_rate')[0]} rate {measured[kind.rate]:,.1f} GB/s"
    case = f"{rate} · {measured['isa']}" if "isa" in measured else rate
    source = f"{machine}, git {str(measured.get('software', {}).get('git'))[:12]}."
    return Rows(
        f"roofline{suffix}", "Attention against what the memory delivers", case, (kind.note, source),
        tuple(map(_label, rows)), (panel,), exact=True,
    )  # fmt: skip


def _label(row: dict[str, Any]) -> str:
    label = "{dtype}, group {group}\n{tokens:,} tokens".format(**row)
    return f"{label}, {row['threads']} thread{'s' * (row['threads'] > 1)}" if "threads" in row else label
