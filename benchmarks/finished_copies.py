"""What is saved by copies that carry results: steps of ``reproducible=`` with and without, in turn.

    jobs/emulated_cluster --nodes 4 --ranks-per-node 2 --bandwidth 1gbit --delay 0.1ms --yield -- \\
        mpiexec -n 8 python -m mpi4py benchmarks/finished_copies.py --json docs/results/finished_copies.json

16 heads of 128, four tokens on each rank; microseconds on the slowest rank, and the ratio of medians. A
schedule without copies stands beside: its ratio is 1 but for noise. Bytes: of all ranks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from treeattn import Decoder, communicators
from treeattn.decoder import finished_copies
from treeattn.study import environment

HEADS, HEAD_DIM, TOKENS = 16, 128, 4


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--schemes", default="hierarchical,reduce_scatter_gather,binary_tree,recursive_doubling"
    )
    parser.add_argument("--batches", default="1,4,16,64")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    world = communicators.world()
    rows = [
        measured(world, scheme, batch, options.turns)
        for batch in map(int, options.batches.split(","))
        for scheme in options.schemes.split(",")
    ]
    facts = {"rows": rows, "software": environment.software(), "machine": environment.machine(world)}
    if world.rank == 0:
        for row in rows:
            print(", ".join(f"{name} {value}" for name, value in row.items()))
        if options.json:
            options.json.write_text(json.dumps(facts, indent=1) + "\n")


def measured(world: Any, scheme: str, batch: int, turns: int) -> dict[str, Any]:
    """Of one scheme and batch."""
    draw = np.random.default_rng(world.rank)
    q, k, v = (draw.standard_normal((batch, n, HEADS, HEAD_DIM), np.float32) for n in (1, TOKENS, TOKENS))
    decoders = [decoder(world, scheme, batch, light) for light in (False, True)]
    times: list[list[float]] = [[], []]
    for _ in range(turns):
        for one, took in zip(decoders, times, strict=True):
            one(q, k, v)
            world.barrier()
            began = time.perf_counter()
            for _ in range(4):
                one(q, k, v)
            took.append(max(world.allgather(time.perf_counter() - began)) / 4 * 1e6)
    sent = [sum(size for mine in world.allgather(one.sent) for _, size in mine) for one in decoders]
    for one in decoders:
        one.close()
    records, results = map(statistics.median, times)
    return {
        "ranks": world.size,
        "scheme": scheme,
        "batch": batch,
        "executor": decoders[0].executor,
        "records_us": round(records, 1),
        "results_us": round(results, 1),
        "time": round(results / records, 2),
        "bytes": round(sent[1] / sent[0], 3),
    }


def decoder(world: Any, scheme: str, batch: int, light: bool) -> Decoder:
    """Whose copies are results, or not, whatever their size."""
    decides = finished_copies.pays
    finished_copies.pays = lambda _, __, schedule: light and bool(schedule.rounds_of("copying"))
    try:
        planned = {"heads": HEADS, "kv_heads": HEADS, "head_dim": HEAD_DIM, "dtype": "float32"}
        return Decoder(world, **planned, batch=batch, scheme=scheme, reproducible="tokens")
    finally:
        finished_copies.pays = decides


if __name__ == "__main__":
    main()
