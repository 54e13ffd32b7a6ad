"""What a reduction costs beside the library's own: mpiexec -n 2 python -m mpi4py benchmarks/reduction.py

Goals at 2 ranks, 16 heads x 128: recursive_doubling at most 2 times an MPI_Allreduce(SUM) of the same bytes,
binary_tree at most 3 times, both below three separate allreduces. All cases are interleaved in one run, since
machines are noisy; ratios are what to read. `floor` is the bare exchange: the messages without merges.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import numpy as np
from mpi4py import MPI

from treeattn import collectives, comm
from treeattn.backends.cpu import MergeOperator, NullOperator
from treeattn.collectives.executors.mpi import Reducer
from treeattn.collectives.libraries.mpi_allreduce import MpiAllreduce
from treeattn.collectives.reducer import Reduction
from treeattn.study import environment


def cases(world, heads: int, head_dim: int) -> dict:
    """name -> a callable that does one reduction."""
    operator = MergeOperator(head_dim)
    records = np.random.default_rng(world.rank).random((heads, head_dim + 2), np.float32) + 1
    packed, received = records.copy(), np.empty_like(records)
    top, denominator = (np.ascontiguousarray(records[:, i]) for i in (0, 1))
    numerator = np.ascontiguousarray(records[:, 2:])
    small, large = np.empty_like(top), np.empty_like(numerator)

    def three():
        world.Allreduce(top, small, MPI.MAX)
        world.Allreduce(denominator, small, MPI.SUM)
        world.Allreduce(numerator, large, MPI.SUM)

    def planned(scheme, op=operator):
        return Reducer(Reduction(world, op, records.copy()), collectives.build(scheme, world.size))

    return {
        "MPI_Allreduce(SUM)": lambda: world.Allreduce(packed, received, MPI.SUM),
        "three allreduces": three,
        "mpi_allreduce": MpiAllreduce(Reduction(world, operator, records.copy())),
        "floor of recursive_doubling": planned("recursive_doubling", NullOperator(head_dim)),
        **{name: planned(name) for name in collectives.names("schedule")},
    }


def measure(world, repeats: int, iterations: int, heads: int, head_dim: int) -> dict[str, list[float]]:
    """Microseconds per reduction on the slowest rank, one value per repeat."""
    runs = cases(world, heads, head_dim)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats):
        order = np.random.default_rng(repeat).permutation(list(runs))  # the same on every rank
        for name in order:
            run = runs[name]
            for _ in range(5):
                run()
            world.Barrier()
            began = MPI.Wtime()
            for _ in range(iterations):
                run()
            times[name].append(world.allreduce(MPI.Wtime() - began, MPI.MAX) / iterations * 1e6)
    for run in runs.values():
        if hasattr(run, "close"):
            run.close()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    world = comm.world()
    times = measure(world, options.repeats, options.iterations, options.heads, options.head_dim)
    placement = environment.placement(world)
    if world.rank:
        return
    base = statistics.median(times["MPI_Allreduce(SUM)"])
    rows = {
        name: {
            "median_us": statistics.median(values),
            "min_us": min(values),
            "ratio": statistics.median(values) / base,
        }
        for name, values in times.items()
    }
    load = environment.node_load(placement) or "a core per rank"
    print(f"{world.size} ranks, {options.heads} x {options.head_dim}; {load}")
    for name, row in sorted(rows.items(), key=lambda item: item[1]["median_us"]):
        print(f"{name:30s} {row['median_us']:8.2f} us  x{row['ratio']:.2f}   (best {row['min_us']:.2f})")
    if options.json:
        facts = {
            "ranks": placement,
            "software": environment.software(),
            "times": rows,
            "options": vars(options),
        }
        options.json.write_text(json.dumps(facts, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
