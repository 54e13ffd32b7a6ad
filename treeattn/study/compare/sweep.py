"""Many blocks in a fair order: case by case, repetition by repetition, schemes in a new random order each
time.

A case is everything but the scheme. What the results file holds already is not measured again, so a killed
run goes on where it ended.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from treeattn.collectives.schedule import Schedule
from treeattn.errors import TreeattnError
from treeattn.mpi.communicators import MpiCommunicator
from treeattn.study.compare.measure import Bench, Budget
from treeattn.study.compare.rows import Key


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
) -> Iterator[tuple[Block, dict[str, Any] | TreeattnError | None]]:
    """Measure keys of all ranks, those of a case after one another. Collective.

    done: blocks that need not be measured again, with the microseconds that each took.
    user_schedules: those among the schemes, by name.

    Gives each block with None before it starts, and then, on rank 0, with the columns of its row; and a block
    of each scheme that cannot run, with the error.
    """
    bench, done = Bench(comm, budget, user_schedules or {}), done or {}
    for _, of_case in itertools.groupby(keys, lambda key: key.case):
        case = list(of_case)
        plan = [block for block in blocks(case, budget.repetitions) if block not in done]
        if not plan:
            continue
        try:
            inputs = bench.inputs(plan[0].key)
        except TreeattnError as error:  # the same on every rank
            yield from ((Block(key, 0), error) for key in case)
            continue
        spent: defaultdict[Key, float] = defaultdict(float)  # seconds
        for block, took in done.items():
            spent[block.key] += took / 1e6
        for block in plan:
            if spent[block.key] > budget.patience or spent[block.key] == math.inf:
                continue
            yield block, None
            try:
                found = bench.block(block.key, inputs)
            except TreeattnError as error:  # raised by planning, the same on every rank
                spent[block.key] = math.inf
                yield block, error
                continue
            spent[block.key] += comm.bcast(found and found["took_us"] / 1e6)
            if found is not None:
                yield block, found
