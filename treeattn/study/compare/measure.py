"""Blocks in a fair order, and one block: planned anew, called cold, warmed, timed, and its result checked.

A case is everything but the scheme. Cases are measured one after the other, repetition by repetition, schemes
in a new random order each time. What the results file holds already is not measured again, so a killed run
goes on where it ended. Everything here is collective; what was found is on rank 0.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np

from treeattn.collectives.parameters import Groups
from treeattn.collectives.schedule import Schedule
from treeattn.decoder.planned import PlannedDecode
from treeattn.errors import TreeattnError
from treeattn.mpi.communicators import MpiCommunicator
from treeattn.study import environment
from treeattn.study.compare import problems, steps
from treeattn.study.compare.loop import Clock, Loop
from treeattn.study.compare.rows import ENOUGH, Key
from treeattn.study.why import Tiers, by_tier, counts

WARMUP = {"reduce": 5, "decode": 1}
FEWEST = 3
PARTS = {("decode", "cpu"): ("local", "reduce", "finish")}  # of other keys the whole is timed


@dataclass(frozen=True, slots=True)
class Budget:
    """How much is measured: blocks of a key, at most so many iterations in each, about so many seconds of
    iterations for all blocks of a key; longer for `ENOUGH` in each where half of `patience` suffices, and
    never fewer than 3. No further block of a key that took `patience` seconds in all, planning and cold calls
    included."""

    repetitions: int = 11
    iterations: int = 200
    seconds: float = 1.0
    patience: float = math.inf

    def count(self, slowest: float) -> int:
        """Iterations of a block when one takes so many seconds."""
        all_blocks = self.repetitions * max(slowest, 1e-9)
        affordable = max(self.seconds / all_blocks, min(ENOUGH, self.patience / 2 / all_blocks))
        return int(max(FEWEST, min(self.iterations, affordable)))


class Bench:
    """Measures blocks on one communicator. Creating it is collective.

    user_schedules: those among the schemes, by name.
    """

    def __init__(self, comm: MpiCommunicator, budget: Budget, user_schedules: Mapping[str, Schedule]) -> None:
        self.comm, self.budget, self.user_schedules = comm, budget, user_schedules
        self.groups = comm.nodes
        placement = environment.placement(comm)
        self.machines = [entry["machine"] for entry in placement]
        self.loop = Loop(comm, Clock(comm), environment.node_load(placement) is not None)

    def inputs(self, key: Key) -> problems.Inputs:
        """Inputs for every scheme of the key's case. Raises what `problems.check_room` raises."""
        problems.check_room(self.comm, key, self.machines)
        make = problems.decode_inputs if key.what == "decode" else problems.reduce_inputs
        return make(self.comm, key)

    def block(self, key: Key, inputs: problems.Inputs) -> dict[str, Any] | None:
        """The measured columns of a `Row` on rank 0, None elsewhere. Raises what planning raises."""
        began = time.perf_counter()
        step = steps.plan(self.comm, key, self.user_schedules)
        planning = self.loop.agree_on_slowest(time.perf_counter() - began)
        parts, prepare = _calls(key, inputs, step)
        cold = self.loop.run(parts, prepare, 1)
        facts = self._facts(key, inputs, step)
        timed = self.loop.run(parts, prepare, self._warm(key, parts, prepare))
        step.close()  # not after an error: that is collective, and a rank may have failed alone
        took = self.loop.agree_on_slowest(time.perf_counter() - began)
        if timed is None or cold is None:
            return None
        names = PARTS.get((key.what, key.device), ())
        series = {name: median(values) for name, values in timed.samples(names).items()}
        of_ranks, step_time = timed.of_ranks(), series["after_last_entry"]
        bandwidth = None if key.what == "decode" else key.record_bytes / step_time / 1e3
        return {
            "bytes": key.record_bytes,
            "time_us": step_time,
            "algbw": bandwidth,
            "busbw": bandwidth and bandwidth * 2 * (key.ranks - 1) / key.ranks,
            "completion_us": series["completion"],
            "slowest_us": max(of_ranks),
            "least_us": min(of_ranks),
            "mean_us": fmean(of_ranks),
            **{f"{name}_us": series[name] for name in names},
            "plan_us": planning * 1e6,
            "first_us": cold.samples()["completion"][0],
            "took_us": took * 1e6,
            "iterations": timed.instants.shape[1],
            "late": timed.late,
            "clock_error_us": timed.clock_error,
            **facts,
        }

    def _warm(self, key: Key, parts: Any, prepare: Callable[[], object]) -> int:
        """Untimed calls; how many timed ones the slowest rank can afford that take as long as the shortest of
        those."""
        spent = math.inf
        for _ in range(WARMUP[key.what]):
            prepare()
            began = time.perf_counter()
            for part in parts:
                part()
            spent = min(spent, time.perf_counter() - began)
        return self.budget.count(self.loop.agree_on_slowest(spent + 2 * self.loop.lead / 1e6))

    def _facts(self, key: Key, inputs: problems.Inputs, step: PlannedDecode) -> dict[str, Any]:
        """What does not depend on time: the result's error and bits, and what was sent."""
        proved, counted = step.certificate, {}
        if step.schedule is not None:  # all records of a head are never cut
            counted = counts(step.schedule, self.groups, key.heads, key.record_bytes // key.heads)
        sent = handed_over(self.comm, step.sent, self.groups)
        judged = key.algorithm is None
        if judged and key.what == "reduce":
            step.finish()
        return {
            "executor": step.executor,
            "determinism": proved.determinism if proved else "measured",
            "depth": proved and proved.depth,
            "as_scheduled": None if not counted else sent is not None and sent.items() <= counted.items(),
            **counted,
            **(sent or {}),
            **(self._judged(inputs, step) if judged else {}),
        }

    def _judged(self, inputs: problems.Inputs, step: PlannedDecode) -> dict[str, Any]:
        out, lse = map(inputs.device.to_host, (step.out, step.lse))
        everyone = self.comm.gather((out, lse), root=0)
        if everyone is None:
            return {}
        assert inputs.expected is not None
        assert inputs.bounds is not None
        replicated = step.heads == slice(0, inputs.expected[0].shape[2])
        digests = {_digest(*result) for result in everyone}
        if not replicated:
            out = np.concatenate([heads for heads, _ in everyone], axis=2)
            lse = np.concatenate([heads for _, heads in everyone], axis=1)
        return {
            "same_bits": len(digests) == 1 if replicated else None,
            "digest": _digest(out, lse),
            "error_out": float(np.abs(out - inputs.expected[0]).max()),
            "error_lse": float(np.abs(lse - inputs.expected[1]).max()),
            "bound_out": inputs.bounds[0],
            "bound_lse": inputs.bounds[1],
        }


def _calls(key: Key, inputs: problems.Inputs, step: PlannedDecode) -> tuple[Any, Callable[[], object]]:
    """The timed parts of an iteration, and what precedes them untimed. What a GPU was given to do is waited
    for: the clock does not stop before."""
    given: Any = inputs.q, inputs.k, inputs.v
    memory = inputs.device.memory

    def fresh() -> None:
        """A reduction works in place: not on the results of the last one."""
        memory.copy(step.records, inputs.records)
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


def handed_over(comm: MpiCommunicator, sent: Any, groups: Groups) -> Tiers | None:
    """Bytes of a step from what each rank handed to MPI: a list of (destination, bytes), one for each
    message.

    Of a library's collective only the payload is known, and between nodes not which tier takes it. None where
    not even that is. Collective.
    """
    everyone: list[Any] = comm.allgather(sent)
    if any(mine is None for mine in everyone):
        return None
    if not isinstance(sent, int):
        return by_tier(((src, dst, size) for src, mine in enumerate(everyone) for dst, size in mine), groups)
    if len(groups) > 1:
        return {"bytes_library": sum(everyone)}
    return {"messages_intra": None, "bytes_intra": sum(everyone), "messages_inter": 0, "bytes_inter": 0}


class Block(NamedTuple):
    """One entry of the plan: repetition `repetition` of `key`."""

    key: Key
    repetition: int


def blocks(case: Sequence[Key], repetitions: int) -> Iterator[Block]:
    """Those of one case in the order of measuring, the same on every rank."""
    for repetition in range(repetitions):
        order = random.Random(f"{repetition} {case[0].case}")
        for key in order.sample(case, len(case)):
            yield Block(key, repetition)


def sweep(
    comm: MpiCommunicator,
    keys: Sequence[Key],
    budget: Budget,
    done: Mapping[Block, float] | None = None,
    user_schedules: Mapping[str, Schedule] | None = None,
    say: Callable[[str], object] = lambda _: None,
) -> Iterator[tuple[Block, dict[str, Any] | TreeattnError]]:
    """Measure keys of all ranks, those of a case after one another. Collective.

    done: blocks that need not be measured again, with the microseconds that each took.
    user_schedules: those among the schemes, by name. say: called before each block with how far it is.

    Gives on rank 0 each block with the columns of its row; and, on every rank, a block of each scheme that
    cannot run, with the error.
    """
    bench, done = Bench(comm, budget, user_schedules or {}), done or {}
    cases = [list(case) for _, case in itertools.groupby(keys, lambda key: key.case)]
    plans = [[block for block in blocks(case, budget.repetitions) if block not in done] for case in cases]
    todo, measured, began = sum(map(len, plans)), 0, time.monotonic()
    spent: defaultdict[Key, float] = defaultdict(float)  # seconds
    for block, took in done.items():
        spent[block.key] += took / 1e6
    for case, plan in zip(cases, plans, strict=True):
        if not plan:
            continue
        try:
            inputs = bench.inputs(plan[0].key)
        except TreeattnError as error:  # the same on every rank
            yield from ((Block(key, 0), error) for key in case)
            continue
        for block in plan:
            if spent[block.key] > budget.patience or spent[block.key] == math.inf:
                continue
            progress = f"{measured:,} of {todo:,} blocks are done"
            if measured:
                left = (time.monotonic() - began) / measured * (todo - measured)
                progress += f", at most {left:,.0f} s are left"
            say(f"{block.key.what} {block.key.label}: {progress}")
            try:
                found = bench.block(block.key, inputs)
            except TreeattnError as error:  # raised by planning, the same on every rank
                spent[block.key] = math.inf
                yield block, error
                continue
            spent[block.key] += comm.bcast(found and found["took_us"] / 1e6)
            measured += 1
            if found is not None:
                yield block, found
