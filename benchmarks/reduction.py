"""What a reduction costs against the library's own: mpiexec -n 2 python -m mpi4py benchmarks/reduction.py

Every scheme by every executor ("slots", "program", "mpi"), 16 heads x 128, interleaved in one run with
MPI_Allreduce(SUM) of the same bytes. Ratios to it are what to read: of medians, and of the best blocks,
which other work on the machine disturbs least. Beside them the library with the merge as its operator, and
three separate allreduces.

Goals of recursive_doubling: with "slots" at most 0.35 on 2 ranks whose cores share a cache, 0.65 where they
do not, 0.4 on 4 and 8 ranks that share 2 cores; with "program" 1.2 on 2 ranks (Open MPI: 1.0). Of binary_tree
with "slots" on 2 ranks: 0.5 and 1.05.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
from collections.abc import Callable

import harness
import numpy as np
from mpi4py import MPI

from treeattn import RestrictionError, collectives
from treeattn.backends.cpu import MergeOperator
from treeattn.collectives.executors import compiled, interpreter
from treeattn.collectives.libraries.mpi_allreduce import MpiAllreduce
from treeattn.collectives.runtime.reducer import ReductionSpec
from treeattn.mpi import communicators
from treeattn.study import environment

SUM = ("MPI_Allreduce(SUM)", None)
Case = tuple[str, "str | None"]  # scheme, executor


def libraries(world, records) -> dict[Case, Callable[[], object]]:
    """What the library does by itself."""
    packed, received = records.copy(), np.empty_like(records)
    top, denominator = (np.ascontiguousarray(records[:, i]) for i in (0, 1))
    numerator = np.ascontiguousarray(records[:, 2:])
    small, large = np.empty_like(top), np.empty_like(numerator)

    def three():
        world.Allreduce(top, small, MPI.MAX)
        world.Allreduce(denominator, small, MPI.SUM)
        world.Allreduce(numerator, large, MPI.SUM)

    reduction = ReductionSpec(world, MergeOperator(records.shape[1] - 2), records.copy())
    return {
        SUM: lambda: world.Allreduce(packed, received, MPI.SUM),
        ("three allreduces", None): three,
        ("mpi_allreduce", None): MpiAllreduce(reduction),
    }


def cases(world, heads: int, head_dim: int, schemes: list[str]) -> dict[Case, Callable[[], object]]:
    """(scheme, executor) -> a callable that does one reduction."""
    records = np.random.default_rng(world.rank).random((heads, head_dim + 2), np.float32) + 1
    nodes, oversubscribed = world.nodes, communicators.oversubscribed(world)
    executors = {
        "slots": lambda *what: compiled.plan(*what, nodes=nodes, oversubscribed=oversubscribed),
        "program": lambda *what: compiled.plan(*what, oversubscribed=oversubscribed),
        "mpi": interpreter.InterpretedReducer,
    }
    made = libraries(world, records)
    for executor, reducer in executors.items():
        for scheme in schemes:
            spec = ReductionSpec(world, MergeOperator(head_dim), records.copy())
            try:
                made[scheme, executor] = reducer(spec, collectives.build(scheme, world.size))
            except RestrictionError as error:
                if world.rank == 0:
                    print(f"not measured: {error}")
    return made


def measure(world, options: argparse.Namespace) -> dict[Case, list[float]]:
    """Microseconds per reduction on the slowest rank, one value per repeat."""
    runs = cases(world, options.heads, options.head_dim, options.schemes)

    def step(run: Callable[[], object]) -> float:
        harness.seconds(run, 5)
        return 1e6 * harness.of_slowest(world, run, options.iterations)

    steps = {case: functools.partial(step, run) for case, run in runs.items()}
    times = harness.in_turn(steps, options.repeats, shuffled=True)
    for run in runs.values():
        if hasattr(run, "close"):
            run.close()
    return times


def rows(times: dict[Case, list[float]]) -> list[dict[str, object]]:
    """One for each case, the fastest first."""
    base = statistics.median(times[SUM])
    made = [
        {
            "scheme": scheme,
            "executor": executor,
            "median_us": statistics.median(values),
            "min_us": min(values),
            "ratio": statistics.median(values) / base,
            "ratio_of_best": min(values) / min(times[SUM]),
        }
        for (scheme, executor), values in times.items()
    ]
    return sorted(made, key=lambda row: row["median_us"])


def main() -> None:
    schemes = tuple(collectives.names("schedule"))
    options = harness.options(__doc__, repeats=40, iterations=200, heads=16, head_dim=128, schemes=schemes)
    world = communicators.world()
    measured = rows(measure(world, options))
    placement = environment.placement(world)
    if world.rank:
        return
    load = environment.node_load(placement) or "a core per rank"
    print(f"{world.size} ranks, {options.heads} x {options.head_dim}; {load}")
    for row in measured:
        name = f"{row['scheme']:34s} {row['executor'] or '':8s}"
        print(
            f"{name} {row['median_us']:8.2f} us  x{row['ratio']:.2f}   "
            f"(best {row['min_us']:.2f}, x{row['ratio_of_best']:.2f})"
        )
    facts = {"rows": measured, "ranks": placement, "software": environment.software()}
    options.write(facts | {"load": os.getloadavg(), "options": options.asked})


if __name__ == "__main__":
    main()
