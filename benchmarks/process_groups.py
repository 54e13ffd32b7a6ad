"""A reduction over a process group beside torch's own all-reduce of as many bytes, over gloo:

torchrun --nproc-per-node 2 benchmarks/process_groups.py [--json FILE]

Microseconds of the slowest rank: tenth percentile and median of steps that take turns, one of each way after
the other, each after a barrier.
"""

from __future__ import annotations

import functools

import harness
import numpy as np
import torch
import torch.distributed as dist

from treeattn import collectives
from treeattn.backends.cpu.records import MergeOperator
from treeattn.collectives.runtime.reducer import ReductionSpec
from treeattn.decoder import reducers
from treeattn.mpi import communicators


def main() -> None:
    records = {"type": int, "default": 16, "help": "as many heads of one query"}
    options = harness.options(__doc__, records=records, head_dim=128, scheme="recursive_doubling", repeat=500)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    comm = communicators.intracomm(None)
    operator = MergeOperator(options.head_dim)
    schedule = collectives.build(options.scheme, comm.size)
    sums = torch.ones(options.records * operator.width)
    calls = {"dist.all_reduce": lambda: dist.all_reduce(sums.fill_(1.0))}
    for name in ("torch", "slots"):
        buffer = np.ones((options.records, operator.width), np.float32)
        calls[name] = reducers.run_rounds(name, schedule, ReductionSpec(comm, operator, buffer))

    def step(call):
        dist.barrier()
        return harness.seconds(call)

    steps = {name: functools.partial(step, call) for name, call in calls.items()}
    found = {}
    for name, mine in harness.in_turn(steps, options.repeat, warm=20).items():
        slowest = np.max(comm.allgather(mine), axis=0) * 1e6
        found[name] = {"p10": float(np.percentile(slowest, 10)), "median": float(np.median(slowest))}
    if comm.rank == 0:
        print(
            f"{comm.size} ranks, {options.records} records of {operator.width} floats, {options.scheme}; us"
        )
        for name, times in found.items():
            ratio = {key: value / found["dist.all_reduce"][key] for key, value in times.items()}
            print(
                f"  {name:16} {times['p10']:8.1f} {times['median']:8.1f}   of all_reduce "
                f"{ratio['p10']:.2f} {ratio['median']:.2f}"
            )
        about = {"ranks": comm.size, "records": options.records, "width": operator.width}
        about |= {"scheme": options.scheme, "torch": torch.__version__, **harness.source()}
        options.write(about | {"microseconds": found})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
