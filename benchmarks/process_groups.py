"""A reduction over a process group beside torch's own all-reduce of as many bytes, over gloo:

torchrun --nproc-per-node 2 benchmarks/process_groups.py [--json FILE]

Microseconds of the slowest rank: tenth percentile and median of steps that take turns, one of each way after
the other, each after a barrier.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from treeattn import collectives, communicators
from treeattn.backends.cpu.records import MergeOperator
from treeattn.collectives.runtime.reducer import ReductionSpec
from treeattn.decoder import reducers
from treeattn.study import environment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--records", type=int, default=16, help="as many heads of one query")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--scheme", default="recursive_doubling")
    parser.add_argument("--repeat", type=int, default=500)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
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
    spent = {name: np.zeros(options.repeat) for name in calls}
    for step in range(-20, options.repeat):
        for name, call in calls.items():
            dist.barrier()
            began = time.perf_counter()
            call()
            if step >= 0:
                spent[name][step] = time.perf_counter() - began
    found = {}
    for name, mine in spent.items():
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
        if options.json:
            about = {"ranks": comm.size, "records": options.records, "width": operator.width}
            about |= {"scheme": options.scheme, "torch": torch.__version__}
            about |= {"software": environment.software(), "cpu": environment.cpu_name()}
            options.json.write_text(json.dumps(about | {"microseconds": found}, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
