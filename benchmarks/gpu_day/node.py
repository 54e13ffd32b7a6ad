"""The GPUs of a node together, timed by themselves: mpiexec -n 8 python -m mpi4py -m gpu_day.node --json FILE

A reduction of 8 KB over peer memory with the division that ends it, by scheme, and a step over 64 Ki tokens:
`COUNT` of them in one CUDA graph of each rank, events of the device around it. A lap is what the last rank
took, over `COUNT`; where ranks arrive shows in the first of so many alone. Predicted: gpu_predicted.json.
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import harness
import numpy as np

import treeattn
from treeattn import communicators
from treeattn.backends.cuda import cupy_runtime
from treeattn.study.roofline.cuda import captured, cold_caches, upload_random

SCHEMES = ("all_gather_merge", "recursive_doubling", "binary_tree")
HEAD_DIM, RECORDS, COUNT, LAPS = 128, 16, 200, 5
HEADS, KV_HEADS, TOKENS = 32, 8, 65536


def microseconds(world: Any, stopwatch: Any, calls: Sequence[Callable[[], object]], laps: int) -> list[float]:
    """Of one call in each lap, on the rank that took longest. Collective."""
    graph = captured(stopwatch.runtime, calls)
    stopwatch.runtime.synchronize()
    found = []
    for _ in range(laps + 1):
        world.Barrier()
        (seconds,) = stopwatch.laps([graph])
        found.append(max(world.allgather(seconds)) / len(calls) * 1e6)
    return found[1:]


def decoder(world: Any, scheme: str, heads: int, kv_heads: int) -> treeattn.PlannedDecode:
    how = treeattn.Reduction(scheme, transport="peer")
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": HEAD_DIM, "dtype": "bfloat16"}
    return treeattn.Decoder(world, **shape, device="cuda", scheme=how)


def reduction(
    world: Any, stopwatch: Any, scheme: str, count: int = COUNT, laps: int = LAPS
) -> dict[str, Any]:
    """Of as many records as a query of 16 heads has. Collective."""
    with decoder(world, scheme, RECORDS, RECORDS) as planned:
        times = microseconds(world, stopwatch, [planned.plan.complete] * count, laps)
    return {"what": "reduction", "scheme": scheme, "bytes": RECORDS * (HEAD_DIM + 2) * 4, "laps": times}


def step(
    world: Any, stopwatch: Any, scheme: str, tokens: int = TOKENS, count: int = COUNT, laps: int = LAPS
) -> dict[str, Any]:
    """Of one query over so many tokens, dealt out to the ranks, with a cold L2 cache. Collective."""
    q = upload_random(stopwatch.runtime, (1, 1, HEADS, HEAD_DIM), np.dtype(np.uint16))
    caches = cold_caches(stopwatch, tokens // world.size, KV_HEADS, "bfloat16")
    with decoder(world, scheme, HEADS, KV_HEADS) as planned:
        calls = [functools.partial(planned, q, *caches[i % len(caches)]) for i in range(count)]
        times = microseconds(world, stopwatch, calls, laps)
    return {"what": "step", "scheme": scheme, "tokens": tokens, "laps": times}


def main() -> None:
    options = harness.options(__doc__, required=True)
    if problem := cupy_runtime.problem():
        sys.exit(f"node.py: {problem}")
    from treeattn.backends.cuda.cupy_stopwatch import CupyStopwatch

    world = communicators.world()
    cupy_runtime.choose(communicators.node_local_rank(world))
    stopwatch, rows = CupyStopwatch(), []
    for measure in (reduction, step):
        for scheme in SCHEMES:
            rows.append(measure(world, stopwatch, scheme) | {"ranks": world.size})
            if world.rank == 0:
                options.write({"rows": rows})
                print("{what}, {scheme}:".format(**rows[-1]), f"{statistics.median(rows[-1]['laps']):.2f} us")


if __name__ == "__main__":
    main()
