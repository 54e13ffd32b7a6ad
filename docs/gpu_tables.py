"""What `benchmarks/gpu_day.sh` measured, as tables for docs/on-a-gpu.md; "not yet" where it was not."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["STEPS", "TABLES"]

RESULTS = Path(__file__).resolve().parent / "results"

#: Every step of gpu_day.sh, and what it finds out.
STEPS = {
    "versions": "the driver, CUDA, NCCL, MPI and the tools",
    "doctor": "what treeattn misses there",
    "tests": "`tests/gpu`",
    "memcheck": "compute-sanitizer: addresses out of bounds",
    "initcheck": "compute-sanitizer: memory that nobody wrote",
    "racecheck": "compute-sanitizer: races in shared memory",
    "kernel": "the kernel against the copy rate",
    "beside": "the same, beside torch and what else is installed",
    "roofline": "every type of cache against the copy rate",
    "ncu": "why: four launches under Nsight Compute",
    "splits": "which number of splits is the fastest",
    "host": "two ranks, records by way of the host",
    "model": "tiny Llamas: the processor's tokens, Hugging Face's logits",
    "ranks": "several ranks of NCCL on one GPU, every scheme",
    "peer": "ranks that read one another's memory, every schedule",
    "compare": "schemes beside each other, every transport",
    "bits": "the emulator against the hardware, bit by bit",
}

_NOT_YET = "Not yet."
Table = tuple[Sequence[str], list[list[str]]]


def _steps() -> Table:
    rows = []
    for step, what in STEPS.items():
        facts = _result(step)
        rows.append(
            [f"`{step}`", what, _outcome(facts) if facts else "not yet", _where(facts) if facts else ""]
        )
    return ["step", "what", "outcome", "on"], rows


def _outcome(facts: dict[str, Any]) -> str:
    if facts["problem"]:
        return f"failed: {facts['problem']}"
    return f"[done](results/gpu_{facts['step']}.json)"


def _where(facts: dict[str, Any]) -> str:
    gpus = facts["machine"]["gpus"] or [{"name": "unknown", "driver_version": "unknown"}]
    return f"{facts['date'][:10]}, {len(gpus)} x {gpus[0]['name']}, driver {gpus[0]['driver_version']}"


def _kernel() -> Table | str:
    """From the run beside others if there is one."""
    facts = _result("beside") or _result("kernel")
    if facts is None:
        return _NOT_YET
    rows = [row for row in facts["result"]["rows"] if "problem" not in row]
    names = list(dict.fromkeys(name for row in rows for name in row["microseconds"]))
    cells = [
        [_heads(row), str(row["tokens"]), f"{row['floor_microseconds']:.1f}"]
        + [_timed(row, name) for name in names]
        for row in rows
    ]
    return [
        "heads",
        "tokens",
        "bytes / copy rate, µs",
        *(f"{name}, µs (% of copy rate)" for name in names),
    ], cells


def _timed(row: dict[str, Any], name: str) -> str:
    if name not in row["microseconds"]:
        return "-"
    return f"{row['microseconds'][name]:.1f} ({row['percent_of_copy_rate'][name]:.0f})"


def _roofline() -> Table | str:
    facts = _result("roofline")
    if facts is None:
        return _NOT_YET
    rows = [
        [row["dtype"], str(row["group"]), f"{row['microseconds']:.1f}", f"{row['percent_of_copy_rate']:.0f}"]
        for row in facts["result"]["rows"]
    ]
    return ["type", "query heads per KV head", "µs", "% of copy rate"], rows


def _ncu() -> Table | str:
    facts = _result("ncu")
    if facts is None:
        return _NOT_YET
    headings = [
        "heads",
        "tokens",
        "µs",
        "DRAM, %",
        "occupancy, % (limit)",
        "registers",
        "warps wait most for",
    ]
    return headings, [_profiled(row) for row in facts["result"]]


def _profiled(row: dict[str, Any]) -> list[str]:
    numbers = f"{row['microseconds']:.1f}", f"{row['dram_percent']:.0f}"
    occupancy = f"{row['occupancy_percent']:.0f} ({row['occupancy_limit_percent']:.0f})"
    waits = ", ".join(f"{why} {warps:.1f}" for why, warps in list(row["stalled_warps"].items())[:3])
    return [_heads(row), str(row["tokens"]), *numbers, occupancy, f"{row['registers']:.0f}", waits]


def _heads(row: dict[str, Any]) -> str:
    return f"{row['heads']}/{row['kv_heads']}"


def _result(step: str) -> dict[str, Any] | None:
    path = RESULTS / f"gpu_{step}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


#: Name in a page's `<!-- gpu NAME -->` -> headings and rows, or a sentence.
TABLES: dict[str, Callable[[], Table | str]] = {
    "steps": _steps,
    "kernel": _kernel,
    "roofline": _roofline,
    "ncu": _ncu,
}
