"""A measured step of a schedule, round by round on all ranks: what the simulator says, as it happened.

Python runs the rounds (`executors/interpreter.py`) and reads the clock four times in each; a step takes that
much longer, and longer than by compiled executors. All ranks read one clock, or clocks that were compared.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from treeattn import communicators
from treeattn.backends.cpu import MergeOperator
from treeattn.collectives import Schedule
from treeattn.collectives.drawings.trace import Instants, measured
from treeattn.collectives.executors import interpreter
from treeattn.collectives.runtime.communicator import MpiCommunicator
from treeattn.collectives.runtime.reducer import ReductionSpec
from treeattn.study import environment
from treeattn.study.compare.clock import Clock, on_common_clock
from treeattn.study.compare.loop import Loop

_WARMUP = 5


class _Noting(interpreter.Reducer):
    """The reducer that notes nanoseconds: of each step, of each of this rank's rounds, four."""

    def __init__(self, reduction: ReductionSpec, schedule: Schedule, clock: Clock) -> None:
        super().__init__(reduction, schedule)
        self._now = clock.now
        self.noted: list[list[int]] = []

    @property
    def numbers(self) -> list[int]:
        """Of the rounds in which this rank has something to do, from 0 as in `traffic`."""
        return [step.number - 1 for step in self.rounds]

    def _step(self) -> None:
        now, noted = self._now, []
        for step in self.rounds:
            noted.append(now())
            self.messages.start(step.number)
            noted.append(now())
            self.messages.wait(step.number)
            noted.append(now())
            for call in step.calls:
                call()
            noted.append(now())
        self.noted.append(noted)


def measure(
    comm: MpiCommunicator, schedule: Schedule, heads: int, head_dim: int, queries: int, iterations: int
) -> str | None:
    """The trace of the iteration with the median time, of so many, on rank 0. Collective."""
    values = np.random.default_rng(comm.rank).random((heads * queries, head_dim + 2), np.float32)
    buffer, clock = values.copy(), Clock(comm)
    oversubscribed = environment.node_load(environment.placement(comm)) is not None
    loop = Loop(comm, clock, oversubscribed, seed=0)
    reduction = ReductionSpec(comm, MergeOperator(head_dim), buffer, queries)
    with _Noting(reduction, schedule, clock) as reducer:
        before = clock.compare()
        times = loop.run((reducer,), lambda: np.copyto(buffer, values), _WARMUP + iterations)
        noted = np.array(reducer.noted, np.int64)  # [iterations, 4 x rounds]
        mine = on_common_clock(noted.ravel(), before, clock.compare()).reshape(noted.shape)
        everyone = comm.gather((reducer.numbers, mine))
    if times is None or everyone is None:
        return None
    completions = times.samples()["completion"][_WARMUP:]
    chosen = _WARMUP + int(np.argsort(completions)[len(completions) // 2])
    start = int(times.instants[:, chosen, 0].min())
    ranks = [_rounds(numbers, noted[chosen] - start) for numbers, noted in everyone]
    node = {rank: at for at, ranks in enumerate(communicators.node_groups(comm)) for rank in ranks}
    sent = list(schedule.traffic(heads * queries, queries))
    return measured(schedule.name, [node[rank] for rank in range(comm.size)], sent, ranks)


def _rounds(numbers: list[int], noted: Any) -> dict[int, Instants]:
    times = (noted.reshape(-1, 4) / 1000).tolist()
    return {number: Instants(*four) for number, four in zip(numbers, times, strict=True)}
