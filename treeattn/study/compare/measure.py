"""One block of one scheme: planned anew, called cold, warmed, timed, and its result checked.

Everything here is collective over the communicator of the block; what was found is on rank 0.
"""

from __future__ import annotations

import functools
import hashlib
import math
import time
import tracemalloc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from treeattn import communicators
from treeattn.collectives.clusters.disturbance import ALL_TOGETHER, Arrivals
from treeattn.collectives.parameters import Groups, node_of
from treeattn.collectives.runtime.communicator import MpiCommunicator
from treeattn.collectives.runtime.reducer import Sent
from treeattn.collectives.schedule import Schedule
from treeattn.decoder.planned import PlannedDecode
from treeattn.study import environment
from treeattn.study.compare import problems, steps
from treeattn.study.compare.clock import Clock
from treeattn.study.compare.loop import Loop, Times
from treeattn.study.compare.results import ENOUGH
from treeattn.study.compare.schema import NULL, SUM, Key

WARMUP = {"reduce": 5, "decode": 1}
FEWEST = 3
JUDGEMENT = ("same_bits", "digest", "error_out", "error_lse", "bound_out", "bound_lse")
PARTS = {("decode", "cpu"): ("local", "reduce", "finish")}  # of other keys the whole is timed


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured: blocks of a key, at most so many iterations in each, about so many seconds of
    iterations for all blocks of a key; longer for `ENOUGH` in each where half of `patience` suffices, and
    never fewer than 3. No further block of a key that took `patience` seconds in all, planning and cold calls
    included. warmup: untimed calls before; None for `WARMUP`. stop_early: no further block of a key whose
    answer is there."""

    repetitions: int = 10
    iterations: int = 200
    seconds: float = 1.0
    patience: float = math.inf
    warmup: int | None = None
    stop_early: bool = False

    def count(self, slowest: float) -> int:
        """Iterations of a block when one takes so many seconds."""
        all_blocks = self.repetitions * max(slowest, 1e-9)
        affordable = max(self.seconds / all_blocks, min(ENOUGH, self.patience / 2 / all_blocks))
        return int(max(FEWEST, min(self.iterations, affordable)))


class Bench:
    """Measures blocks on one communicator. Creating it is collective."""

    def __init__(
        self,
        comm: MpiCommunicator,
        effort: Effort,
        oversubscribed: bool,
        seed: int,
        own: Mapping[str, Schedule] | None = None,
        arrivals: Mapping[str, Arrivals] = ALL_TOGETHER,
    ) -> None:
        """own: schedules of one's own among the schemes, by name; arrivals: likewise."""
        self.arrivals = arrivals
        self.comm, self.effort, self.seed, self.own = comm, effort, seed, own or {}
        self.groups = communicators.node_groups(comm)
        self.machines = [entry["machine"] for entry in environment.placement(comm)]
        self.clock = Clock(comm)
        self.loop = Loop(comm, self.clock, oversubscribed, seed)

    def problem(self, key: Key) -> problems.Problem:
        """Inputs for every scheme of the key's case. Raises what `problems.check_room` raises."""
        problems.check_room(self.comm, key, self.machines)
        make = problems.decode_problem if key.what == "decode" else problems.reduce_problem
        return make(self.comm, key, self.seed)

    def block(self, key: Key, problem: problems.Problem, memory: bool) -> dict[str, Any] | None:
        """The fields of a point (see `treeattn.study.compare.schema`) on rank 0, None elsewhere.

        memory: also run two steps under tracemalloc, after what is timed. Raises what planning raises.
        """
        began = time.perf_counter()
        step = steps.plan(self.comm, key, self.own)
        planning = self.loop.agree_on_slowest(time.perf_counter() - began)
        cold = self.loop.run(*_calls(key, problem, step), 1)
        facts = self._facts(key, problem, step)
        count, timed = self._warm(key, problem, step)
        without_merge = None
        on_cpu = key.device == "cpu"
        if on_cpu and key.what == "reduce" and step.schedule is not None and key.wire == "float32":
            _, without_merge = self._warm(
                key, problem, steps.plan_null_merge(self.comm, key, self.own), count
            )
        weighed = memory and on_cpu  # of a GPU's memory tracemalloc knows nothing
        allocated = self._memory(key, problem) if weighed else {"held": None, "step_peak": None}
        if timed is None or cold is None:
            return None
        samples = timed.samples(PARTS.get((key.what, key.device), ()))
        if without_merge is not None:
            samples["null_merge"] = without_merge.samples()["completion"]
        return {
            "plan": round(planning * 1e6, 3),
            "first": cold.samples()["completion"][0],
            "late": timed.late,
            "warmup": self._warmup(key),
            "clock_error": timed.clock_error,
            **facts,
            **allocated,
            "samples": samples,
            "of_ranks": timed.of_ranks(),
        }

    def _warmup(self, key: Key) -> int:
        return WARMUP[key.what] if self.effort.warmup is None else self.effort.warmup

    def _warm(
        self, key: Key, problem: problems.Problem, step: PlannedDecode, count: int | None = None
    ) -> tuple[int, Times | None]:
        """The last of a step: untimed calls, then `count` timed ones, by default as many as the slowest rank
        can afford that take as long as the shortest of those. Closes it; not after an error, since that is
        collective and a rank may have failed alone.
        """
        parts, prepare = _calls(key, problem, step)
        spent = math.inf
        for _ in range(self._warmup(key)):
            prepare()
            began = time.perf_counter()
            for part in parts:
                part()
            spent = min(spent, time.perf_counter() - began)
        if count is None:
            overhead = 2 * self.loop.lead / 1e6 + key.spread / 1e6
            count = self.effort.count(self.loop.agree_on_slowest(spent + overhead))
        timed = self.loop.run(parts, prepare, count, self.arrivals[key.arrivals])
        step.close()
        return count, timed

    def _memory(self, key: Key, problem: problems.Problem) -> dict[str, int]:
        """Bytes that a plan holds after its first step, and that a second step adds at its peak."""
        tracemalloc.start()
        try:
            step = steps.plan(self.comm, key, self.own)
            parts, prepare = _calls(key, problem, step)
            for _ in range(2):
                prepare()
                tracemalloc.reset_peak()
                held = tracemalloc.get_traced_memory()[0]
                for part in parts:
                    part()
            peak = tracemalloc.get_traced_memory()[1]
            step.close()
        finally:
            tracemalloc.stop()
        everyone = self.comm.allgather((held, max(peak - held, 0)))
        return {"held": max(h for h, _ in everyone), "step_peak": max(p for _, p in everyone)}

    def _facts(self, key: Key, problem: problems.Problem, step: PlannedDecode) -> dict[str, Any]:
        """What does not depend on time: the result's error and bits, and what was sent."""
        proved, scheduled = step.certificate, None
        if step.schedule is not None:
            size = 2 if key.wire == "bfloat16" else step.records.itemsize
            row = key.batch * key.queries * (key.head_dim + 2) * size
            scheduled = scheduled_tiers(step.schedule, key.heads, row, self.groups)
        judged = key.scheme not in (SUM, NULL)
        if judged and key.what == "reduce":
            step.finish()
        return {
            "executor": step.executor,
            "determinism": proved.determinism if proved else "measured",
            "rounds": proved and proved.rounds,
            "depth": proved and proved.depth,
            "sent": handed_over(self.comm, step.sent, self.groups),
            "scheduled": scheduled,
            **(self._judged(problem, step) if judged else dict.fromkeys(JUDGEMENT)),
        }

    def _judged(self, problem: problems.Problem, step: PlannedDecode) -> dict[str, Any]:
        out, lse = map(problem.device.to_host, (step.out, step.lse))
        everyone = self.comm.gather((out, lse), root=0)
        if everyone is None:
            return {}
        assert problem.expected is not None
        assert problem.bounds is not None
        replicated = step.heads == slice(0, problem.expected[0].shape[2])
        digests = {_digest(*result) for result in everyone}
        if not replicated:
            out = np.concatenate([heads for heads, _ in everyone], axis=2)
            lse = np.concatenate([heads for _, heads in everyone], axis=1)
        return {
            "same_bits": len(digests) == 1 if replicated else None,
            "digest": _digest(out, lse),
            "error_out": float(np.abs(out - problem.expected[0]).max()),
            "error_lse": float(np.abs(lse - problem.expected[1]).max()),
            "bound_out": problem.bounds[0],
            "bound_lse": problem.bounds[1],
        }


def _calls(key: Key, problem: problems.Problem, step: PlannedDecode) -> tuple[Any, Callable[[], object]]:
    """The timed parts of an iteration, and what precedes them untimed. What a GPU was given to do is waited
    for: the clock does not stop before."""
    given: Any = problem.q, problem.k, problem.v
    memory = problem.device.memory

    def fresh() -> None:
        """A reduction works in place: not on the results of the last one."""
        memory.copy(step.records, problem.records)
        memory.synchronize()

    def waited(run: Callable[..., object], *given: Any) -> Callable[[], object]:
        def call() -> None:
            run(*given)
            step.synchronize()

        return call

    if key.device == "cuda":
        return ((waited(step, *given),), tuple) if key.what == "decode" else ((waited(step.fold),), fresh)
    if key.what == "decode":
        return (functools.partial(step.local, *given), step.reduce, step.finish), tuple
    return (step.fold,), fresh


def _digest(out: Any, lse: Any) -> str:
    return hashlib.sha256(out.tobytes() + lse.tobytes()).hexdigest()[:16]


Tiers = dict[str, list[Any]]


def scheduled_tiers(schedule: Schedule, rows: int, row_bytes: int, groups: Groups) -> Tiers:
    """Tier -> [messages, bytes] of one step of `schedule`, all ranks together.

    The records are `rows` of `row_bytes` that a chunk never cuts (all records of a head). groups: the ranks
    of each node.
    """
    sent = ((m.src, m.dst, m.records * row_bytes) for m in schedule.traffic(rows))
    return _by_tier(sent, groups)


def handed_over(comm: MpiCommunicator, sent: Any, groups: Groups) -> Tiers | None:
    """The same from what each rank handed to MPI: a list of (destination, bytes), one for each message.

    Of a library's collective only the payload is known: its messages are None, its tier is ``unknown``
    unless there is but one node. None where not even that is. Collective.
    """
    everyone: list[Any] = comm.allgather(sent)
    if any(mine is None for mine in everyone):
        return None
    if not isinstance(sent, Sent):
        return _by_tier(((src, dst, size) for src, mine in enumerate(everyone) for dst, size in mine), groups)
    counts, sizes = zip(*everyone, strict=True)
    tier = "intra" if len(groups) == 1 else "unknown"
    return _by_tier((), groups) | {tier: [None if None in counts else sum(counts), sum(sizes)]}


def _by_tier(sent: Iterable[tuple[int, int, int]], groups: Groups) -> Tiers:
    """sent: source, destination, bytes."""
    node = node_of(groups)
    tiers: Tiers = {"intra": [0, 0], "inter": [0, 0]}
    for src, dst, size in sent:
        count = tiers["intra" if node[src] == node[dst] else "inter"]
        count[0] += 1
        count[1] += size
    return tiers
