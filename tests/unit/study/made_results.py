"""Results files with made-up times, for readers to be tested on: nothing in them was measured."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from treeattn.study.compare.rows import SUM, Key, Row

SCHEMES = ("binary_tree", "kv_ring", "mpi_allreduce", SUM)


def keys(schemes: Iterable[str] = SCHEMES, tokens: Sequence[int] = (4096, 65536), **fields: Any) -> list[Key]:
    """Keys of decoding steps, of every length with every scheme; of reductions for a length of 0."""
    known = {"ranks": 4, "batch": 1, "queries": 1, "heads": 16, "kv_heads": 8, "head_dim": 128,
             "dtype": "bfloat16"} | fields  # fmt: skip
    return [
        Key(what="decode" if length else "reduce", scheme=scheme, tokens=length, **known)
        for length in tokens
        for scheme in schemes
    ]


def row(key: Key, repetition: int = 0, run: str = "made", **fields: Any) -> Row:
    """Times grow with the length of the scheme's name, the size and the repetition."""
    time = (40.0 * len(key.scheme) + (key.tokens or key.record_bytes) / 500) * (1 + 0.03 * repetition)
    known: dict[str, Any] = {
        "run": run, "commit": "0123456789abcdef", "treeattn": "1.0", "mpi": "MPI of nobody",
        "processor": "No CPU", "nodes": [rank // 2 for rank in range(key.ranks)], "repetition": repetition,
        "bytes": key.record_bytes, "time_us": time, "plan_us": 50 * time, "first_us": 4 * time,
        "iterations": 20, "command": "treeattn compare", "determinism": "A",
        "digest": None if key.scheme == SUM else "00", "same_bits": None if key.scheme == SUM else True,
    }  # fmt: skip
    if key.scheme != SUM:
        known |= {"error_out": 1e-7, "error_lse": 1e-7, "bound_out": 1e-6, "bound_lse": 1e-5}
    return Row(**msgspec.structs.asdict(key), **known | fields)


def write(path: Path, found: Iterable[Key], repetitions: int = 6, **fields: Any) -> Path:
    """Append a run to a file."""
    lines = (row(key, repetition, **fields) for key in found for repetition in range(repetitions))
    with path.open("ab") as file:
        file.writelines(msgspec.json.encode(line) + b"\n" for line in lines)
    return path
