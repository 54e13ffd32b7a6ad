"""Results files with made-up times, for readers to be tested on: nothing in them was measured."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from treeattn.study.compare.schema import FORMAT, NULL, SUM, Key

SCHEMES = ("binary_tree", "kv_ring", "mpi_allreduce", SUM, NULL)


def keys(schemes: Iterable[str] = SCHEMES, tokens: Sequence[int] = (4096, 65536), **fields: Any) -> list[Key]:
    """Keys of decoding steps, of every length with every scheme."""
    known = {"what": "decode", "ranks": 4, "batch": 1, "queries": 1, "heads": 16, "kv_heads": 8,
             "head_dim": 128, "dtype": "bfloat16"} | fields  # fmt: skip
    return [Key(scheme=scheme, tokens=length, **known) for length in tokens for scheme in schemes]


def run_line(run: str = "made", nodes: Sequence[int] = (0, 0, 1, 1), **fields: Any) -> dict[str, Any]:
    software = {"git": "0123456789abcdef", "packages": {"treeattn": "1.0"}, "mpi": "MPI of nobody"}
    ranks = [
        {"rank": r, "host": f"h{n}", "node": n, "cpu": "No CPU", "cores": 8} for r, n in enumerate(nodes)
    ]
    return {"kind": "run", "format": FORMAT, "run": run, "software": software, "ranks": ranks,
            "started": "2020-01-01T00:00:00+00:00", "warning": None} | fields  # fmt: skip


def point_line(key: Key, repetition: int = 0, run: str = "made", **fields: Any) -> dict[str, Any]:
    """Times grow with the length of the scheme's name, the context and the repetition."""
    base = 40.0 * len(key.scheme) + key.tokens * (8 if key.scheme.startswith("kv_ring") else 1) / 500
    warm = [base * (1 + 0.03 * repetition) + i for i in range(3)]
    known = key.scheme not in (SUM, NULL, "mpi_allreduce")
    waits = [value - 1 + key.spread for value in warm]
    pair = [2 * len(key.scheme), 1000 * len(key.scheme)]
    facts: dict[str, Any] = {
        "plan": 50 * base, "first": 4 * base, "late": 0, "warmup": 5, "clock_error": 0.0, "digest": "00",
        "determinism": "A", "rounds": 2, "depth": 2, "same_bits": True,
        "error_out": 1e-7, "error_lse": 1e-7, "bound_out": 1e-6, "bound_lse": 1e-5,
        "sent": {"intra": pair, "inter": [1, 100]} if known else None,
        "scheduled": None, "held": int(100 * base), "step_peak": 500,
        "samples": {"completion": warm, "slowest": warm, "after_last_entry": waits},
    }  # fmt: skip
    if key.scheme in (SUM, NULL):  # there is no result to judge
        facts |= dict.fromkeys(("digest", "error_out", "error_lse", "bound_out", "bound_lse", "same_bits"))
    return {"kind": "point", "format": FORMAT, "run": run, "key": asdict(key), "launch": 1,
            "repetition": repetition, **facts, **fields}  # fmt: skip


def write(path: Path, found: Iterable[Key], repetitions: int = 6, **run: Any) -> Path:
    """A file of one run."""
    line = run_line(**run)
    points = [point_line(key, repetition, line["run"]) for key in found for repetition in range(repetitions)]
    with path.open("a") as file:
        file.writelines(json.dumps(entry) + "\n" for entry in [line, *points])
    return path
