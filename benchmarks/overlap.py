"""How much of a reduction disappears behind other work, on two nodes of one rank:

    jobs/emulated_cluster --nodes 2 --ranks-per-node 1 --delay 1ms --bandwidth 1gbit -- \
        mpiexec -n 2 python -m mpi4py benchmarks/overlap.py --json docs/results/overlap.json

Goal: at least half of the reduction's time behind other work of 10 ms. Other work is matrix products of
NumPy, between which a caller may look after the reduction. `hidden` is 1 - (both - work) / reduction: 1 where
the reduction costs nothing, 0 where nothing overlaps. All are interleaved; set OPENBLAS_NUM_THREADS=1.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable

import harness
import numpy as np
from mpi4py import MPI

import treeattn
from treeattn.study import environment

SCHEMES = ("recursive_doubling", "hierarchical", "binary_tree", "reduce_scatter_gather", "mpi_allreduce")


class Work:
    """So many milliseconds of arithmetic, in pieces."""

    def __init__(self, milliseconds: float) -> None:
        self._a = np.random.default_rng(0).random((96, 96), np.float32)
        harness.seconds(self._piece, 100)
        one = harness.seconds(self._piece, 500)
        self.pieces = MPI.COMM_WORLD.bcast(max(1, round(milliseconds / 1e3 / one)))

    def _piece(self) -> None:
        self._a @ self._a

    def __call__(self, between: Callable[[], object] = tuple, every: int = 10) -> None:
        for piece in range(self.pieces):
            self._piece()
            if piece % every == 0:
                between()


def cases(world: MPI.Intracomm, work: Work, batch: int) -> dict[tuple[str, str], Callable[[], object]]:
    """(scheme, what) -> a callable that does a step, or a step around the work."""
    made: dict[tuple[str, str], Callable[[], object]] = {}
    draw = np.random.default_rng(world.rank)
    q = np.random.default_rng(0).standard_normal((batch, 1, 16, 128)).astype(np.float32)
    k, v = (draw.standard_normal((batch, 8, 16, 128)).astype(np.float32) for _ in "kv")
    for scheme in SCHEMES:
        shape = {"heads": 16, "kv_heads": 16, "head_dim": 128, "batch": batch, "dtype": "float32"}
        decoder = treeattn.Decoder(world, **shape, scheme=scheme)

        def both(between: Callable[[], object] = tuple, decoder: treeattn.Decoder = decoder) -> None:
            decoder.begin(q, k, v)
            work(between)
            decoder.finish()

        made[scheme, "step"] = lambda decoder=decoder: decoder(q, k, v)
        made[scheme, "untouched"] = both
        made[scheme, "test"] = lambda decoder=decoder, both=both: both(decoder.test)
    return made


def measure(world: MPI.Intracomm, work: Work, batch: int, repeats: int) -> list[dict[str, object]]:
    """A row for each scheme and way of progress. Work alone is timed just before each step around it:
    machines grow faster and slower, and only neighbours can be compared."""
    run = cases(world, work, batch)

    def beside_work(call: Callable[[], object]) -> tuple[float, float]:
        return 1e3 * harness.of_slowest(world, work), 1e3 * harness.of_slowest(world, call)

    steps = {case: functools.partial(beside_work, call) for case, call in run.items()}
    rows: list[dict[str, object]] = []
    for (scheme, what), pairs in harness.in_turn(steps, repeats, warm=2).items():
        if what == "step":
            step = statistics.median(taken for _, taken in pairs)
            continue
        hidden = harness.quartiles(1 - (both - alone) / step for alone, both in pairs)
        rows.append(
            {
                "scheme": scheme,
                "progress": what,
                "step_ms": step,
                "work_ms": statistics.median(alone for alone, _ in pairs),
                "hidden": hidden[0],
                "hidden_quartiles": hidden[1:],
            }
        )
    return rows


def main() -> None:
    milliseconds = {"type": float, "default": 10.0, "help": "milliseconds (default 10)"}
    sequences = {"type": int, "default": 1, "help": "sequences: the records that travel (default 1)"}
    arguments = harness.options(__doc__, repeats=50, work=milliseconds, batch=sequences)
    world = MPI.COMM_WORLD
    rows = measure(world, Work(arguments.work), arguments.batch, arguments.repeats)
    about = harness.source() | {"ranks": environment.placement(world)}
    if world.rank:
        return
    print(f"{world.size} ranks, batch {arguments.batch}; hidden: median and quartiles")
    for row in rows:
        low, high = row["hidden_quartiles"]
        line = (
            "{scheme:22} {progress:10} step {step_ms:6.2f} ms, work {work_ms:6.2f} ms, hidden {hidden:5.0%}"
        )
        print(line.format(**row), f"({low:.0%} to {high:.0%})")
    arguments.write(about | {"batch": arguments.batch, "rows": rows})


if __name__ == "__main__":
    main()
