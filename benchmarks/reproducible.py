"""What one bit pattern costs: ``reproducible=`` beside the default, in turn.

    python benchmarks/reproducible.py --json docs/results/reproducible.json
    mpiexec -n 2 python benchmarks/reproducible.py --json docs/results/reproducible.json

The local part on one rank: attention of one query to a shard of 8 KV heads of 128, for 1 and 4 query heads
each, on every instruction set of this machine; the fastest of all turns, and its ratio to the default's. With
--against DIR also to the default's of another checkout, which runs in turn in a process of its own. On
several ranks the reduction of 16 records of 128, and with what makes results of them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
import ml_dtypes
import numpy as np

from treeattn import Decoder, communicators
from treeattn.backends.cpu import compile
from treeattn.decoder.reproducible import REPRODUCIBLE
from treeattn.study import environment

KV_HEADS, HEAD_DIM = 8, 128
#: A step for every line that comes: seconds.
_OTHER = """
import sys, time, ml_dtypes, numpy, treeattn
dtype, group, kv_heads, tokens, dim = sys.argv[1], *map(int, sys.argv[2:])
shapes = (1, 1, group * kv_heads, dim), (1, tokens, kv_heads, dim)
q, k, v = (numpy.random.default_rng(1).standard_normal(shapes[n > 0]).astype(dtype) for n in range(3))
decoder = treeattn.Decoder(None, heads=group * kv_heads, kv_heads=kv_heads, head_dim=dim, dtype=dtype)
for line in sys.stdin:
    began = time.perf_counter()
    decoder.local(q, k, v)
    print(time.perf_counter() - began, flush=True)
"""
TYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def main() -> None:
    checkout = {"type": Path, "help": "a checkout of treeattn"}
    options = harness.options(__doc__, tokens=8192, turns=200, against=checkout)
    world = communicators.world()
    if world.size == 1:
        rows = local(options.tokens, options.turns, options.against)
    else:
        rows = reduction(world, options.turns)
    machine = environment.machine(world)
    if world.rank == 0:
        harness.show(rows)
        options.write({"rows": rows, "machine": machine})


def local(tokens: int, turns: int, against: Path | None) -> list[dict[str, Any]]:
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
                with other(against, name, group, tokens) as step:
                    found = fastest(steps | ({} if step is None else {"other": step}), turns)
                rows.append({"isa": isa, "dtype": name, "group": group, **found})
    return rows


@contextlib.contextmanager
def other(checkout: Path | None, *arguments: object) -> Iterator[Callable[[], float] | None]:
    """A step of the default in another checkout."""
    if checkout is None:
        yield None
        return
    words = [sys.executable, "-c", _OTHER, *map(str, (*arguments[:2], KV_HEADS, *arguments[2:], HEAD_DIM))]
    with subprocess.Popen(  # whose directory comes first where Python looks for modules
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=checkout
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def step() -> float:
            print(file=process.stdin, flush=True)
            return float(process.stdout.readline())

        yield step
        process.stdin.close()


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
    """Microseconds of the default, and how many times as long the others take: as it, and as the other's."""
    best = {how: min(times) for how, times in harness.in_turn(steps, turns).items()}
    default, others = best.pop(None), best.pop("other", None)
    row = {"default_us": round(default * 1e6, 1)}
    row |= {str(how): round(one / default, 2) for how, one in best.items()}
    if others is not None:
        row |= {"other_us": round(others * 1e6, 1)}
        row |= {f"{how}_of_other": round(one / others, 2) for how, one in best.items()}
    return row


if __name__ == "__main__":
    main()
