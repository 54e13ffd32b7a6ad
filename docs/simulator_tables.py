"""Tables of docs/topology.md and docs/predicted.md: the simulator beside measurements on a calibrated
cluster, from what `benchmarks/calibrated.py` wrote, and beside SimGrid, from that of
`benchmarks/second_opinion.py`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
Table = tuple[Sequence[str], Sequence[Sequence[str]]]


def errors() -> Table:
    """Of all schemes, size by size."""
    facts = _read("calibrated/calibrated.json")
    rows = []
    for size in sorted({row["bytes"] for row in facts["rows"]}):
        found = sorted(_off(row) for row in facts["rows"] if row["bytes"] == size)
        rows.append(
            [f"{size:,}", str(len(found)), *map(_percent, (median(found), found[int(0.9 * len(found))]))]
        )
    whole = [_percent(facts["median_error"]), _percent(facts["p90_error"])]
    return ("bytes", "schemes", "median error", "90 % within"), [
        *rows,
        ["all", str(len(facts["rows"])), *whole],
    ]


def choices() -> Table:
    """What auto would take, beside the best."""
    rows = [
        [f"{choice['bytes']:,}", f"`{choice['taken']}`", f"`{choice['best']}`", f"{choice['ratio']:.2f}"]
        for choice in _read("calibrated/calibrated.json")["choices"]
    ]
    return ("bytes", "by prediction", "fastest measured", "time, of the fastest's"), rows


def opinion() -> Table:
    """How far SimGrid is."""
    facts = _read("second_opinion.json")
    rows = [
        [f"messages {words}", str(facts[words]["cases"]),
         *(f"{100 * facts[words][name]:.1f} %" for name in ("median", "p90", "largest")), _percent(band)]
        for words, band in zip(("wait for no port", "wait"), facts["bands"], strict=True)
    ]  # fmt: skip
    return ("", "cases", "median difference", "90 % within", "largest", "band"), rows


def _off(row: dict[str, Any]) -> float:
    return abs(row["predicted_us"] / row["measured_us"] - 1)


def _percent(value: float) -> str:
    return f"{value:.0%}".replace("%", " %")


def _read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


TABLES: dict[str, Callable[[], Table]] = {"errors": errors, "choices": choices, "opinion": opinion}
