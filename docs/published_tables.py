"""Tables of docs/predicted.md, from what `treeattn published --json` wrote."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

RESULTS = Path(__file__).resolve().parent / "results"
Row = dict[str, Any]
Table = tuple[Sequence[str], Sequence[Sequence[str]]]

_HEADINGS = ("rows", "median error", "90 % of rows", "within 25 %")
_TWO = ("two parameters: median", "90 % of rows", "within 25 %")


def by(key: str) -> Table:
    """Errors of groups of rows, and of all; beside the two-parameter model."""
    groups: defaultdict[Any, list[Row]] = defaultdict(list)
    rows = _read("published.json")["rows"]
    for row in rows:
        groups[row[key]].append(row)
    cells = [
        [f"`{name}`" if key == "scheme" else f"{name}", *_cells(groups[name])] for name in sorted(groups)
    ]
    return ("", *_HEADINGS, *_TWO), [*cells, ["all", *_cells(rows)]]


def overall() -> Table:
    """The score against what was set as the goal."""
    told, blind = _read("published.json"), _read("published_blind.json")
    goals = {"median_error": "at most 9 %", "p90_error": "at most 25 %", "within_25": "at least 90 %",
             "ratio_error": "at most 10 %"}  # fmt: skip
    words = {"median_error": "median error", "p90_error": "90 % of rows are within",
             "within_25": "rows within 25 %", "ratio_error": "ratio of two schemes, median"}  # fmt: skip
    rows = [
        [
            words[name],
            _percent(told[name]),
            goals[name],
            _percent(told["two_parameters"][name]),
            _percent(blind[name]),
        ]
        for name in goals
    ]
    named = f"{told['winner_named']} of {told['winner_cases']}"
    rows.append(["fastest program named, or one within 5 %", named, "no score", "-", "-"])
    return ("", "three given", "goal", "two parameters", "nothing given (median goal: 12 %)"), rows


def missed() -> Table:
    """Rows that are off by more than a quarter."""
    rows = [row for row in _read("published.json")["rows"] if abs(_off(row)) > 0.25]
    cells = [
        [row["system"], str(row["ranks"]), row["run"][:10].replace("_", "-"), f"`{row['algorithm']}`",
         str(row["bytes"]), f"{row['measured_us']:.0f}", f"{_off(row):+.0%}"]
        for row in sorted(rows, key=lambda row: -abs(_off(row)))
    ]  # fmt: skip
    return ("system", "ranks", "day", "program", "bytes", "measured, µs", "predicted"), cells


TABLES: dict[str, Callable[[], Table]] = {
    "overall": overall,
    "system": lambda: by("system"),
    "scheme": lambda: by("scheme"),
    "bytes": lambda: by("bytes"),
    "missed": missed,
}


def _read(name: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return facts


def _off(row: Row, of: str = "predicted_us") -> float:
    return float(row[of] / row["measured_us"] - 1)


def _cells(rows: Sequence[Row]) -> list[str]:
    cells = [str(len(rows))]
    for of in ("predicted_us", "two_parameters_us"):
        errors = [abs(_off(row, of)) for row in rows]
        within = sum(error <= 0.25 for error in errors) / len(errors)
        cells += [_percent(median(errors)), _percent(float(np.quantile(errors, 0.9))), _percent(within)]
    return cells


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %" if value >= 0.095 else f"{100 * value:.1f} %"
