"""How much of a reduction disappears behind other work, on two nodes of one rank:

    jobs/emulated_cluster --nodes 2 --ranks-per-node 1 --delay 1ms --bandwidth 1gbit -- \
        mpiexec -n 2 python -m mpi4py benchmarks/overlap.py --json docs/results/overlap.json

Goal: at least half of the reduction's time behind other work of 10 ms. Other work is matrix products of
NumPy, between which a caller may look after the reduction. `hidden` is 1 - (both - work) / reduction: 1 where
the reduction costs nothing, 0 where nothing overlaps. All are interleaved; set OPENBLAS_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from mpi4py import MPI

import treeattn
from treeattn.study import environment

SCHEMES = ("recursive_doubling", "hierarchical", "binary_tree", "reduce_scatter_gather", "mpi_allreduce")


class Work:
    """So many milliseconds of arithmetic, in pieces."""

    def __init__(self, milliseconds: float) -> None:
        self._a = np.random.default_rng(0).random((96, 96), np.float32)
        for _ in range(100):
            self._piece()
        start = time.perf_counter()
        for _ in range(500):
            self._piece()
        one = (time.perf_counter() - start) / 500
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
        for progress in ("calls", "thread"):
            how = treeattn.Reduction(scheme, progress=progress)
            shape = {"heads": 16, "kv_heads": 16, "head_dim": 128, "batch": batch, "dtype": "float32"}
            decoder = treeattn.Decoder(world, **shape, scheme=how)

            def both(between: Callable[[], object] = tuple, decoder: treeattn.Decoder = decoder) -> None:
                decoder.begin(q, k, v)
                work(between)
                decoder.finish()

            if progress == "calls":
                made[scheme, "step"] = lambda decoder=decoder: decoder(q, k, v)
                made[scheme, "untouched"] = both
                made[scheme, "test"] = lambda decoder=decoder, both=both: both(decoder.test)
            else:
                made[scheme, "thread"] = both
    return made


def timed(world: MPI.Intracomm, call: Callable[[], object]) -> float:
    """Milliseconds on the slowest rank."""
    world.barrier()
    start = time.perf_counter()
    call()
    return 1e3 * world.allreduce(time.perf_counter() - start, MPI.MAX)


def measure(world: MPI.Intracomm, work: Work, batch: int, repeats: int) -> list[dict[str, object]]:
    """A row for each scheme and way of progress. Work alone is timed just before each step around it:
    machines grow faster and slower, and only neighbours can be compared."""
    run = cases(world, work, batch)
    alone: dict[tuple[str, str], list[float]] = {case: [] for case in run}
    spent: dict[tuple[str, str], list[float]] = {case: [] for case in run}
    for repeat in range(repeats + 2):
        for case, call in run.items():
            before, taken = timed(world, work), timed(world, call)
            if repeat >= 2:
                alone[case].append(before)
                spent[case].append(taken)
    rows: list[dict[str, object]] = []
    for scheme, what in run:
        if what == "step":
            step = statistics.median(spent[scheme, "step"])
            continue
        pairs = zip(spent[scheme, what], alone[scheme, what], strict=True)
        added = statistics.quantiles([both - work for both, work in pairs], n=4)
        hidden = [1 - more / step for more in reversed(added)]
        rows.append(
            {
                "scheme": scheme,
                "progress": what,
                "step_ms": step,
                "work_ms": statistics.median(alone[scheme, what]),
                "hidden": hidden[1],
                "hidden_quartiles": [hidden[0], hidden[2]],
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--work", type=float, default=10, help="milliseconds (default 10)")
    parser.add_argument("--batch", type=int, default=1, help="sequences: the records that travel (default 1)")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    world = MPI.COMM_WORLD
    rows = measure(world, Work(arguments.work), arguments.batch, arguments.repeats)
    about = {"software": environment.software(), "cpu": environment.cpu_name()}
    about["ranks"] = environment.placement(world)
    if world.rank:
        return
    print(f"{world.size} ranks, batch {arguments.batch}; hidden: median and quartiles")
    for row in rows:
        low, high = row["hidden_quartiles"]
        line = (
            "{scheme:22} {progress:10} step {step_ms:6.2f} ms, work {work_ms:6.2f} ms, hidden {hidden:5.0%}"
        )
        print(line.format(**row), f"({low:.0%} to {high:.0%})")
    if arguments.json:
        result = about | {"batch": arguments.batch, "rows": rows}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
