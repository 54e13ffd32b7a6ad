"""Nsight Compute's ``--csv --page raw --print-units base``: lines of names, of units, and for each launch.

Names differ between versions and architectures, so what is wanted is found by patterns among all that its
sections collect (SpeedOfLight, Occupancy, LaunchStats, WarpStateStats); what is not found is an error, never
a zero.
"""

from __future__ import annotations

import csv
import re
from typing import Any

from gpu_day.attend import LARGE

# Ours -> pattern of the name of a metric.
_WANTED = {
    "microseconds": r"gpu__time_duration\.sum",
    "dram_percent": r"(?:gpu__|)dram(?:__|_)throughput\.avg\.pct_of_peak_sustained_elapsed",
    "occupancy_percent": r"sm__warps_active\.avg\.pct_of_peak_sustained_active",
    "occupancy_limit_percent": r"sm__maximum_warps_per_active_cycle_pct",
    "registers": r"launch__registers_per_thread",
    "waves": r"launch__waves_per_multiprocessor",
}
# Warps of a scheduler that wait for the reason named, on average, whenever one issues.
_STALL = re.compile(r"\w*issue_stalled_(\w+?)(?:_per_issue_active)?\.ratio")
_NANOSECONDS = {"ns", "nsecond"}


def launches(text: str) -> list[dict[str, Any]]:
    """One entry for each of `LARGE`, in order. Raises `ValueError` for anything else."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        said = [line for line in lines if line.startswith("==ERROR==")]
        raise ValueError(said[0] if said else "ncu wrote no table")
    names, units, *rows = csv.reader(line for line in lines[start:] if line.startswith('"'))
    if len(rows) != len(LARGE):
        raise ValueError(f"ncu saw {len(rows)} launches, not {len(LARGE)}")
    found = [dict(zip(names, row, strict=True)) for row in rows]
    return [
        _launch(case, row, dict(zip(names, units, strict=True)))
        for case, row in zip(LARGE, found, strict=True)
    ]


def _launch(case: Any, row: dict[str, str], units: dict[str, str]) -> dict[str, Any]:
    facts: dict[str, Any] = {"heads": case.heads, "kv_heads": case.kv_heads, "tokens": case.tokens}
    facts |= {"kernel": row["Kernel Name"], "grid": row["Grid Size"], "block": row["Block Size"]}
    for ours, pattern in _WANTED.items():
        name = next((name for name in row if re.fullmatch(pattern, name)), None)
        if name is None:
            raise ValueError(f"ncu did not collect {ours}")
        facts[ours] = _number(row[name])
        if ours == "microseconds":
            if units[name] not in _NANOSECONDS:
                raise ValueError(f"ncu gives {name} in {units[name]}, not in nanoseconds")
            facts[ours] /= 1000
    stalls = {found[1]: _number(row[name]) for name in row if (found := _STALL.fullmatch(name))}
    stalls = {why: warps for why, warps in stalls.items() if not why.endswith("_not_issued")}
    if not stalls:
        raise ValueError("ncu did not collect why warps stall")
    return facts | {"stalled_warps": dict(sorted(stalls.items(), key=lambda item: -item[1]))}


def _number(text: str) -> float:
    """Thousands are parted by commas."""
    return float(text.replace(",", ""))
