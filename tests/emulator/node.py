"""The ranks of a node as threads of one process, each with an emulated GPU, around the kernel that pulls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from treeattn.backends import cuda
from treeattn.collectives import pulls
from treeattn.collectives.check import prove
from treeattn.collectives.schedule import Schedule

from .runtime import EmulatorRuntime

__all__ = ["Node"]

Array = np.ndarray[Any, Any]


class Node:
    """One schedule over records [records, head_dim + 2] of each rank, planned once."""

    def __init__(
        self,
        schedule: Schedule,
        records: int,
        head_dim: int = 64,
        *,
        group: int = 1,
        seconds: float = 30.0,
        program: Callable[[pulls.Program], pulls.Program] = lambda program: program,
        **options: Any,
    ) -> None:
        """program: changes the program of each rank; options: of `EmulatorRuntime`."""
        ranks, folds = range(schedule.size), prove(schedule).folds
        self.runtimes = [EmulatorRuntime(seed=rank, **options) for rank in ranks]
        operators = [cuda.MergeOperator(head_dim, runtime=runtime) for runtime in self.runtimes]
        programs = [program(pulls.plan(schedule, folds, rank, records, group)) for rank in ranks]
        self.buffers = [np.zeros((records, head_dim + 2), np.float32) for _ in ranks]
        exposed = [
            runtime.expose(operator.window_bytes(program))
            for runtime, operator, program in zip(self.runtimes, operators, programs, strict=True)
        ]
        self._windows = [address for address, _ in exposed]
        self.pulls = [
            operators[rank].planned_pull(
                self.buffers[rank],
                programs[rank],
                rank,
                [self.runtimes[rank].open_exposed(handle) for _, handle in exposed],
                seconds,
                operators[rank].pull_blocks(records),
            )
            for rank in ranks
        ]

    def run(
        self, partials: Sequence[Sequence[Array]], ranks: Sequence[int] | None = None
    ) -> list[list[Array]]:
        """One step after the other on each rank, or on those `ranks`, as fast as each can go.

        partials: of each step, of each rank. Returns what each rank holds after each step.
        """
        ranks = range(len(self.buffers)) if ranks is None else ranks
        held: dict[int, list[Array]] = {rank: [] for rank in ranks}

        def work(rank: int) -> None:
            for step in partials:
                self.buffers[rank][...] = step[rank]
                self.pulls[rank]()
                held[rank].append(self.buffers[rank].copy())

        threads = [threading.Thread(target=work, args=(rank,)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [[held[rank][step] for rank in ranks] for step in range(len(partials))]

    @property
    def late(self) -> list[tuple[int, int] | None]:
        """Of each rank: whom it waited for in vain, and in which round."""
        return [pull.late() for pull in self.pulls]

    def close(self) -> None:
        """Free the windows."""
        for runtime, address in zip(self.runtimes, self._windows, strict=True):
            runtime.withdraw(address)

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
