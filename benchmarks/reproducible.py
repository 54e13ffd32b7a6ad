"""What one bit pattern costs: ``reproducible=`` against the default, in turn.

    python benchmarks/reproducible.py --json docs/results/reproducible.json
    mpiexec -n 2 python benchmarks/reproducible.py --json docs/results/reproducible.json

The local part on one rank: attention of one query to a shard of 8 KV heads of 128, for 1 and 4 query heads
each, on every instruction set of this machine; the fastest of all turns, and its ratio to the default's. On
several ranks the reduction of 16 records of 128, and with what makes results of them.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import harness
import ml_dtypes
import numpy as np

from treeattn import Decoder
from treeattn.backends.cpu import compile
from treeattn.backends.cpu.reproducible import REPRODUCIBLE
from treeattn.mpi import communicators
from treeattn.study import environment

KV_HEADS, HEAD_DIM = 8, 128
TYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def main() -> None:
    options = harness.options(__doc__, tokens=8192, turns=200)
    world = communicators.world()
    rows = local(options.tokens, options.turns) if world.size == 1 else reduction(world, options.turns)
    machine = environment.machine(world)
    if world.rank == 0:
        harness.show(rows)
        options.write({"rows": rows, "machine": machine})


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
                steps = {
                    how: functools.partial(harness.seconds, functools.partial(one.local, q, k, v))
                    for how, one in parts.items()
                }
                rows.append({"isa": isa, "dtype": name, "group": group, **fastest(steps, turns)})
    return rows


def reduction(world: Any, turns: int) -> list[dict[str, Any]]:
    """Of 16 heads over all ranks."""
    q, k, v = (np.ones((1, count, 16, HEAD_DIM), np.float32) for count in (1, 2, 2))
    rows = []
    for scheme in ("hierarchical", "recursive_doubling", "reduce_scatter_gather"):
        parts = {how: decoder(world, 16, 16, "float32", how, scheme) for how in (None, *REPRODUCIBLE[:1])}
        for one in parts.values():
            one(q, k, v)
        for what, steps in (
            ("reduced", {how: functools.partial(harness.seconds, one.fold) for how, one in parts.items()}),
            (
                "and finished",
                {
                    how: functools.partial(harness.seconds, functools.partial(finished, one))
                    for how, one in parts.items()
                },
            ),
        ):
            rows.append({"ranks": world.size, "scheme": scheme, "what": what, **fastest(steps, 20 * turns)})
    return rows


def finished(one: Decoder) -> None:
    """A reduction of whatever the records hold, and its result."""
    one.fold()
    one.finish()


def decoder(
    comm: Any, heads: int, kv_heads: int, dtype: str, how: str | None, scheme: str = "hierarchical"
) -> Decoder:
    """Planned for one query."""
    planned = {"heads": heads, "kv_heads": kv_heads, "head_dim": HEAD_DIM, "dtype": dtype, "scheme": scheme}
    return Decoder(comm, **planned, reproducible=how)


def fastest(steps: dict[str | None, Callable[[], float]], turns: int) -> dict[str, Any]:
    """Microseconds of the default, and how many times as long the others take."""
    best = {how: min(times) for how, times in harness.in_turn(steps, turns).items()}
    default = best.pop(None)
    row = {"default_us": round(default * 1e6, 1)}
    return row | {str(how): round(one / default, 2) for how, one in best.items()}


if __name__ == "__main__":
    main()
