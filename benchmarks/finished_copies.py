"""What is saved by copies that carry results: steps of ``reproducible=`` with and without, in turn.

    jobs/emulated_cluster --nodes 4 --ranks-per-node 2 --bandwidth 1gbit --delay 0.1ms --yield -- \\
        mpiexec -n 8 python -m mpi4py benchmarks/finished_copies.py --json docs/results/finished_copies.json

16 heads of 128, four tokens on each rank; microseconds on the slowest rank, and the ratio of medians. A
schedule without copies stands beside: its ratio is 1 but for noise. Bytes: of all ranks.
"""

from __future__ import annotations

import functools
from typing import Any

import harness
import numpy as np

from treeattn import Decoder, communicators
from treeattn.decoder import finished_copies
from treeattn.study import environment

HEADS, HEAD_DIM, TOKENS = 16, 128, 4


def main() -> None:
    schemes = ("hierarchical", "reduce_scatter_gather", "binary_tree", "recursive_doubling")
    options = harness.options(__doc__, schemes=schemes, batches=(1, 4, 16, 64), turns=12)
    world = communicators.world()
    rows = [
        measured(world, scheme, batch, options.turns)
        for batch in options.batches
        for scheme in options.schemes
    ]
    facts = {"rows": rows, "software": environment.software(), "machine": environment.machine(world)}
    if world.rank == 0:
        harness.show(rows)
        options.write(facts)


def measured(world: Any, scheme: str, batch: int, turns: int) -> dict[str, Any]:
    """Of one scheme and batch."""
    draw = np.random.default_rng(world.rank)
    q, k, v = (draw.standard_normal((batch, n, HEADS, HEAD_DIM), np.float32) for n in (1, TOKENS, TOKENS))
    decoders = [decoder(world, scheme, batch, light) for light in (False, True)]

    def step(one: Decoder) -> float:
        one(q, k, v)
        return harness.of_slowest(world, lambda: one(q, k, v), 4) * 1e6

    times = harness.in_turn(
        {light: functools.partial(step, one) for light, one in enumerate(decoders)}, turns
    )
    sent = [sum(size for mine in world.allgather(one.sent) for _, size in mine) for one in decoders]
    for one in decoders:
        one.close()
    records, results = harness.medians(times).values()
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
