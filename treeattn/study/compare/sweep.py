"""Many blocks in a fair order: case by case, repetition by repetition, schemes in a new random order each
time.

A case is everything but the scheme. What the results file holds already is not measured again, so a killed
run goes on where it ended.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
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
