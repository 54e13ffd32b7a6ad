"""Our step, another package's, and bare reading: mpiexec -n 2 python -m mpi4py benchmarks/side_by_side.py

The other is `tree_attn_decode` of ring-attention-pytorch (Algorithm 3 of arXiv 2408.04093) in the same
processes, over torch.distributed with gloo. Goals at 2 ranks, 16 heads x 128, 65536 tokens, one query:
our step is at least 2 times faster in float32 and 2.5 times in bfloat16; it takes at most 1.2 times as long
as reading the shard once while all ranks read; its error against the float64 oracle is the smaller one.

To be fair to the other:
- It computes on the same numbers, copied beforehand into the layout that it documents, [batch, heads, tokens,
  head_dim] contiguous, in memory of the same kind (NumPy's, with huge pages where the system gives them).
- It is given its shard (`shard_kv_seq=False`) and the query, as ours is: nothing else is cut or moved.
- Ours uses one thread per rank, and so does torch.
- Every round runs all cases in random order, each as a step that is not timed, a barrier and a timed step. A
  time is that of the slowest rank, a ratio that of two times of one round. Read the medians over all rounds.
- No step is faster than reading: the other's time over that of reading is the most that any step could reach.
- Its output has the type of the cache, so our error is also given after rounding to that type.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import harness
import numpy as np
from mpi4py import MPI

import treeattn
from treeattn import reference
from treeattn.attention.shape import DTYPES
from treeattn.backends import cpu
from treeattn.backends.cpu import compile
from treeattn.mpi import communicators
from treeattn.study import environment
from treeattn.study.roofline import fastest_reader

try:
    import ring_attention_pytorch
    import torch
    import torch.distributed
except ImportError as error:
    MISSING: str | None = (
        f"{error}; this benchmark compares with packages that treeattn does not need: "
        "pip install torch==2.13.0 ring-attention-pytorch==0.5.20 (torch's CPU build will do)"
    )
else:
    MISSING = None

OURS, OTHER, READING = "treeattn", "tree_attn_decode", "reading the shard"
GOALS = {"float32": 2.0, "bfloat16": 2.5}  # the other's time over ours, at least
READING_GOAL = 1.2  # our time over that of reading, at most


class Problem:
    """One query and this rank's shard of the cache, random; the query is the same on every rank."""

    def __init__(self, world: MPI.Intracomm, tokens: int, heads: int, head_dim: int, dtype: str) -> None:
        self.world, self.dtype = world, dtype
        own = (world.rank + 1) * tokens // world.size - world.rank * tokens // world.size
        self.q = self._draw(0, 1, heads, head_dim)
        self.k, self.v = (self._draw((seed, world.rank), own, heads, head_dim) for seed in (1, 2))

    def _draw(self, seed: Any, tokens: int, heads: int, head_dim: int) -> Any:
        numbers = np.random.default_rng(seed).standard_normal((1, tokens, heads, head_dim), np.float32)
        return numbers.astype(DTYPES[self.dtype])

    def oracle(self) -> tuple[Any, float]:
        """The float64 result, and how much of a difference float32 arithmetic may make."""
        mine = reference.partial(self.q, self.k, self.v, scale=self.q.shape[-1] ** -0.5)
        everyone = self.world.allgather(mine)
        return reference.combine(everyone)[0], reference.error_bounds(everyone)[0]


def as_torch(array: Any) -> Any:
    """The same memory as a tensor; NumPy's bfloat16 is not one of those that torch knows."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def planned_other(problem: Problem) -> Callable[[], Any]:
    """The other package's step, over copies in the layout that it documents."""
    arrays = problem.q, problem.k, problem.v
    tensors = [as_torch(np.ascontiguousarray(array.transpose(0, 2, 1, 3))) for array in arrays]
    torch.set_num_threads(1)
    return lambda: ring_attention_pytorch.tree_attn_decode(*tensors, shard_kv_seq=False)


def planned_reading(*arrays: Any) -> Callable[[], Any]:
    """Reads each array once, on one thread, as fast as one core can."""
    reader = fastest_reader(arrays[0])
    return lambda: [reader.read(array) for array in arrays]


def measure(world: MPI.Intracomm, cases: dict[str, Any], rounds: int, warmup: int = 2) -> dict[str, Any]:
    """Seconds per step on the slowest rank: name -> [rounds]."""

    def step(case: Callable[[], object]) -> float:
        case()
        return harness.of_slowest(world, case)

    steps = {name: functools.partial(step, case) for name, case in cases.items()}
    times = harness.in_turn(steps, rounds, warmup, shuffled=True)
    return {name: np.array(values) for name, values in times.items()}


def errors(problem: Problem, cases: dict[str, Any]) -> dict[str, Any]:
    """Largest and root-mean-square difference from the oracle over all elements, of the worst rank."""
    expected, bound = problem.oracle()
    results = {OURS: cases[OURS]().copy()}
    results[f"{OURS}, rounded to {problem.dtype}"] = results[OURS].astype(problem.q.dtype)
    for name, run in cases.items():
        if name not in (OURS, READING):
            results[name] = run().double().numpy().transpose(0, 2, 1, 3)
    worst: dict[str, Any] = {"largest |out|": float(np.abs(expected).max()), "bound of ours": bound}
    for name, result in results.items():
        difference = np.abs(result.astype(np.float64) - expected)
        own = {"max": difference.max(), "rms": np.sqrt((difference**2).mean())}
        worst[name] = {key: float(problem.world.allreduce(value, MPI.MAX)) for key, value in own.items()}
    return worst


def spread(values: Any) -> dict[str, float]:
    low, middle, high = np.percentile(values, (5, 50, 95))
    return {"median": float(middle), "p5": float(low), "p95": float(high)}


def compare(problem: Problem, scheme: str, rounds: int) -> dict[str, Any]:
    """Everything about one type of cache, for JSON."""
    q, k, v = problem.q, problem.k, problem.v
    heads, head_dim = q.shape[2:]
    planned = {"heads": heads, "kv_heads": heads, "head_dim": head_dim, "dtype": problem.dtype}
    with treeattn.Decoder(problem.world, **planned, scheme=scheme) as decoder:
        cases = {
            OURS: lambda: decoder(q, k, v)[0],
            OTHER: planned_other(problem),
            READING: planned_reading(k, v),
        }
        found = errors(problem, cases)
        times = measure(problem.world, cases, rounds)
    return {
        "dtype": problem.dtype,
        "cache_bytes": problem.world.allreduce(k.nbytes + v.nbytes),
        "milliseconds": {name: spread(values * 1e3) for name, values in times.items()},
        "times_faster": {OTHER: spread(times[OTHER] / times[OURS])},
        "times_faster_goal": GOALS[problem.dtype],
        "times_reading": spread(times[OURS] / times[READING]),
        "times_reading_goal": READING_GOAL,
        "errors": found,
    }


def start_gloo(world: MPI.Intracomm) -> None:
    """torch's process group over the ranks of this job."""
    dist, host = torch.distributed, "127.0.0.1"
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False) if world.rank == 0 else None
    port = world.bcast(store.port if store else None)
    dist.init_process_group(
        "gloo", store=store or dist.TCPStore(host, port), rank=world.rank, world_size=world.size
    )


def check(world: MPI.Intracomm) -> None:
    """Ends the job with one line where there is nothing to measure."""
    problem = MISSING or cpu.compiled_kernels_problem()
    if len(world.nodes) > 1:
        problem = "this benchmark is for the ranks of one machine"
    problem = next(filter(None, world.allgather(problem)), None)
    if problem:
        sys.exit(problem if world.rank == 0 else 1)


def main() -> None:
    options = harness.options(
        __doc__,
        tokens={"type": int, "default": 65536, "help": "of all ranks together"},
        dtypes={"nargs": "+", "default": list(GOALS), "choices": list(GOALS)},
        heads=16,
        head_dim=128,
        scheme="recursive_doubling",
        rounds=40,
    )
    world = communicators.world()
    check(world)
    start_gloo(world)
    machine = {"ranks": environment.placement(world), "load": os.getloadavg(), "isa": compile.chosen_isa()}
    results = []
    for dtype in options.dtypes:
        problem = Problem(world, options.tokens, options.heads, options.head_dim, dtype)
        results.append(compare(problem, options.scheme, options.rounds))
        if world.rank == 0:
            harness.show([results[-1]])
    torch.distributed.destroy_process_group()
    facts = {"machine": machine, "software": software(), "options": options.asked, "results": results}
    options.write(facts)


def software() -> dict[str, Any]:
    peers = {name: version(name) for name in ("torch", "ring-attention-pytorch")}
    facts = environment.software()
    return facts | {"packages": facts["packages"] | peers}


if __name__ == "__main__":
    main()
