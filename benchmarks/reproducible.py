"""What one bit pattern costs: ``reproducible=`` beside the default, in turn.

    python benchmarks/reproducible.py --json docs/results/reproducible.json
    mpiexec -n 2 python benchmarks/reproducible.py --json docs/results/reproducible.json

The local part on one rank: attention of one query to a shard of 8 KV heads of 128, for 1 and 4 query heads
each, on every instruction set of this machine; the fastest of all turns, and its ratio to the default's. On
several ranks the reduction of 16 records of 128 alone.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from treeattn import Decoder, communicators
from treeattn.backends.cpu import compile
from treeattn.decoder.reproducible import REPRODUCIBLE
from treeattn.study import environment

KV_HEADS, HEAD_DIM = 8, 128
TYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    world = communicators.world()
    rows = local(options.tokens, options.turns) if world.size == 1 else reduction(world, options.turns)
    machine = environment.machine(world)
    if world.rank == 0:
        for row in rows:
            print(", ".join(f"{name} {value}" for name, value in row.items()))
        if options.json:
            options.json.write_text(json.dumps({"rows": rows, "machine": machine}, indent=1) + "\n")


def local(tokens: int, turns: int) -> list[dict[str, Any]]:
    """Of one rank, by instruction set, type and heads of a group."""
    draw = np.random.default_rng(1)
    rows = []
    for isa in compile.available_isas()[:2]:
        os.environ["TREEATTN_ISA"] = isa
        for name, dtype in TYPES.items():
            k, v = (
                draw.standard_normal((1, tokens, KV_HEADS, HEAD_DIM), np.float32).astype(dtype) for _ in "kv"
            )
            for group in (1, 4):
                q = draw.standard_normal((1, 1, KV_HEADS * group, HEAD_DIM), np.float32).astype(dtype)
                parts = {
                    how: decoder(None, group * KV_HEADS, KV_HEADS, name, how) for how in (None, *REPRODUCIBLE)
                }
                steps = {how: functools.partial(one.local, q, k, v) for how, one in parts.items()}
                rows.append({"isa": isa, "dtype": name, "group": group, **fastest(steps, turns)})
    return rows


def reduction(world: Any, turns: int) -> list[dict[str, Any]]:
    """Of 16 heads over all ranks, in microseconds of the slowest."""
    parts = {how: decoder(world, 16, 16, "float32", how) for how in (None, *REPRODUCIBLE[:1])}
    q, k, v = (np.ones((1, count, 16, HEAD_DIM), np.float32) for count in (1, 2, 2))
    for one in parts.values():
        one(q, k, v)
    return [{"ranks": world.size, **fastest({how: one.fold for how, one in parts.items()}, 20 * turns)}]


def decoder(comm: Any, heads: int, kv_heads: int, dtype: str, how: str | None) -> Decoder:
    """Planned for one query."""
    return Decoder(comm, heads=heads, kv_heads=kv_heads, head_dim=HEAD_DIM, dtype=dtype, reproducible=how)


def fastest(steps: dict[str | None, Any], turns: int) -> dict[str, Any]:
    """Microseconds of the default, and how many times as long the others take."""
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(turns):
        for how, step in steps.items():
            began = time.perf_counter()
            step()
            best[how] = min(best[how], time.perf_counter() - began)
    default = best.pop(None)
    return {
        "default_us": round(default * 1e6, 1),
        **{str(how): round(one / default, 2) for how, one in best.items()},
    }


if __name__ == "__main__":
    main()
