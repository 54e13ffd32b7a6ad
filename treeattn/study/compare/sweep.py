"""Many blocks in a fair order: case by case, repetition by repetition, schemes in a new random order each
time.

A case is everything but the scheme. What the results file holds already is not measured again, so a killed
run goes on where it ended.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from treeattn.agreement import broadcast_from_root
from treeattn.collectives.clusters.disturbance import ALL_TOGETHER, Arrivals
from treeattn.collectives.runtime import watchdog
from treeattn.collectives.runtime.communicator import MpiCommunicator
from treeattn.collectives.schedule import Schedule
from treeattn.errors import TreeattnError
from treeattn.study import environment
from treeattn.study.compare.answer import LOOKS
from treeattn.study.compare.measure import Bench, Effort
from treeattn.study.compare.schema import Key, members
from treeattn.study.compare.steps import reduces


class Way(NamedTuple):
    """Fields of a `Key`: where its ranks compute, how records travel, who runs the rounds."""

    device: Literal["cpu", "cuda"] = "cpu"
    transport: str = "mpi"
    executor: Literal["slots", "program", "mpi"] | None = None


class Block(NamedTuple):
    """One entry of the plan: repetition `repetition` of `key`."""

    key: Key
    repetition: int


def keys(
    schemes: Sequence[str], ways: Callable[[str], Iterable[Way]] = lambda _: [Way()], **lists: Sequence[Any]
) -> list[Key]:
    """The product of all lists (fields of `Key`), schemes last: neighbours differ in the scheme, and in the
    way that it goes. ways: of each scheme.

    kv_heads 0 stands for as many as heads. A reduction has no tokens, so of its keys those that differ in
    nothing else are one; and schemes that attend and communicate at once have none apart from the step.
    """
    names, values = list(lists), lists.values()
    found = []
    for combination in itertools.product(*values):
        fields = dict(zip(names, combination, strict=True))
        fields["kv_heads"] = fields["kv_heads"] or fields["heads"]
        if fields["what"] == "reduce":
            fields["tokens"] = 0
        if fields["dtype"] == "float64" and fields["wire"] == "float32":
            fields["wire"] = "float64"  # the records of float64 inputs
        found += [Key(scheme=scheme, **way._asdict(), **fields) for scheme in schemes for way in ways(scheme)]
    return [key for key in dict.fromkeys(found) if key.what == "decode" or reduces(key.scheme)]


@dataclass(slots=True)
class Sweep:
    """What `run` does. done: blocks that need not be measured again, with the microseconds that each took.
    own: schedules of one's own among the schemes, by name; arrivals: likewise. answered: on rank 0, of a case
    what needs no further block; asked where the effort is to stop early."""

    keys: Sequence[Key]
    effort: Effort
    launch: int
    seed: int
    done: Mapping[Block, float]
    own: Mapping[str, Schedule] = field(default_factory=dict)
    arrivals: Mapping[str, Arrivals] = field(default_factory=lambda: ALL_TOGETHER)
    answered: Callable[[set[Key]], set[Key]] = lambda case: set()

    def blocks(self, case: Iterable[Key]) -> list[Block]:
        """What is left to do of a case, in the order of doing; the same on every rank."""
        members = list(case)
        plan = []
        for repetition in range(self.effort.repetitions):
            order = random.Random(f"{self.seed} {self.launch} {repetition} {members[0].case}")
            plan += [Block(key, repetition) for key in order.sample(members, len(members))]
        return [block for block in plan if block not in self.done]

    def run(self, world: MpiCommunicator) -> Iterator[tuple[Block, dict[str, Any] | TreeattnError | None]]:
        """Measure everything. Collective; ranks that a case does not use sleep meanwhile.

        Gives each block with None before it starts, and then, on rank 0, with the fields of its point; and a
        block of each scheme that cannot run, with the error.
        """
        placement = environment.placement(world)
        nodes = [entry["node"] for entry in placement]
        for place, of_place in itertools.groupby(self.keys, lambda key: key.place):
            mine, used = list(of_place), members(nodes, place)
            comm: Any = world.Split(0 if world.rank in used else 1, world.rank)
            if world.rank in used:
                oversubscribed = environment.node_load([placement[rank] for rank in used]) is not None
                bench = Bench(comm, self.effort, oversubscribed, self.seed, self.own, self.arrivals)
                with _missing_who_sleeps(world.rank == min(used) and len(used) < world.size):
                    for _, case in itertools.groupby(mine, lambda key: key.case):
                        yield from self._run_case(bench, self.blocks(case))
            world.barrier_asleep()
            comm.Free()

    def _run_case(self, bench: Bench, blocks: list[Block]) -> Iterator[tuple[Block, Any]]:
        if not blocks:
            return
        try:
            problem = bench.problem(blocks[0].key)
        except TreeattnError as error:  # on every rank alike
            yield from ((block, error) for block in {block.key: block for block in blocks}.values())
            return
        spent: defaultdict[Key, float] = defaultdict(float)  # seconds
        for block, took in self.done.items():
            spent[block.key] += took / 1e6
        weighed: set[Key] = set()
        answered: set[Key] = set()
        looked = None
        for block in blocks:
            if self.effort.stop_early and block.repetition != looked:
                if looked is None or block.repetition in LOOKS:
                    answered = self._answered(bench, blocks)
                looked = block.repetition
            if (
                block.key in answered
                or spent[block.key] > self.effort.patience
                or spent[block.key] == math.inf
            ):
                continue
            yield block, None
            began = time.perf_counter()
            try:
                point = bench.block(block.key, problem, memory=block.key not in weighed)
            except TreeattnError as error:  # raised by planning, on every rank alike
                spent[block.key] = math.inf
                yield block, error
                continue
            weighed.add(block.key)
            took = bench.loop.agree_on_slowest(time.perf_counter() - began)
            spent[block.key] += took
            if point is not None:
                yield block, point | {"took": round(took * 1e6)}

    def _answered(self, bench: Bench, blocks: list[Block]) -> set[Key]:
        case = {block.key for block in blocks}
        return broadcast_from_root(bench.comm, lambda: self.answered(case), "whether the answer is there")


def _missing_who_sleeps(look: bool) -> contextlib.AbstractContextManager[object]:
    """While others measure: a rank that is stopped in its sleep is waited for by none of them. One looks."""
    if not look:
        return contextlib.nullcontext()
    return watchdog.Guarded("measurements", "the ranks that sleep meanwhile", patient=True)
