"""The ranks of a node, or of several, as threads of one process, each with an emulated GPU, around the kernel
that pulls."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from treeattn.backends import cuda
from treeattn.collectives import program as ir
from treeattn.collectives.check import prove
from treeattn.collectives.schedule import Schedule

from .runtime import EmulatorRuntime

Array = np.ndarray[Any, Any]


class Node:
    """One schedule over records [records, head_dim + 2] of each rank, planned once. Queues stand for NCCL."""

    def __init__(
        self,
        schedule: Schedule,
        records: int,
        head_dim: int = 64,
        *,
        group: int = 1,
        nodes: Sequence[Sequence[int]] | None = None,
        early: bool = False,
        finish: bool = False,
        seconds: float = 30.0,
        **options: Any,
    ) -> None:
        """nodes: ranks that read one another's memory; None: all. early: a fault: launches do not wait for
        the messages before. finish: a step finishes its records, too. options: of `EmulatorRuntime`."""
        ranks, proof = range(schedule.size), prove(schedule)
        self.runtimes = [EmulatorRuntime(seed=rank, **options) for rank in ranks]
        operators = [cuda.MergeOperator(head_dim, runtime=runtime) for runtime in self.runtimes]
        node = {rank: node for node in nodes or (tuple(ranks),) for rank in node}
        self.programs = [
            ir.plan(schedule, proof, rank, records, granularity=group, node=node[rank]) for rank in ranks
        ]
        self._early = early
        # All at once: made when two threads first ask, one of them would write to a queue that nobody reads.
        self._mail: dict[tuple[int, int], queue.Queue[Array]] = {
            pair: queue.Queue() for pair in itertools.product(ranks, ranks)
        }
        self.buffers = [np.zeros((records, head_dim + 2), np.float32) for _ in ranks]
        exposed = [
            runtime.expose(operator.window_bytes(program))
            for runtime, operator, program in zip(self.runtimes, operators, self.programs, strict=True)
        ]
        self._windows = [address for address, _ in exposed]
        self.pulls = [
            operators[rank].planned_gets(
                self.buffers[rank],
                self.programs[rank],
                [self.runtimes[rank].open_exposed(handle) for _, handle in exposed],
                seconds,
                operators[rank].resident_blocks(records),
            )
            for rank in ranks
        ]

        #: out [1, 1, records, head_dim] and lse [1, records, 1] of each rank, with `finish`.
        self.results = [
            (np.zeros((1, 1, records, head_dim), np.float32), np.zeros((1, records, 1), np.float32))
            for _ in ranks
        ]
        self._finishing = [self._planned_finish(rank) for rank in ranks if finish]

    def _planned_finish(self, rank: int) -> Callable[[], object]:
        """A step that ends with results."""
        records = self.buffers[rank][None, :, None]
        finish = cuda.planned_finish(records, *self.results[rank], runtime=self.runtimes[rank])
        step = self.pulls[rank].fuse_epilogue(finish)
        assert step is not None
        return step

    def run(
        self, partials: Sequence[Sequence[Array]], ranks: Sequence[int] | None = None
    ) -> list[list[Array]]:
        """One step after the other on each rank, or on those `ranks`, as fast as each can go.

        partials: of each step, of each rank. Returns what each rank holds after each step.
        """
        ranks = range(len(self.buffers)) if ranks is None else ranks

        def work(rank: int) -> list[Array]:
            held = []
            for step in partials:
                self.buffers[rank][...] = step[rank]
                self._step(rank)
                held.append(self.buffers[rank].copy())
            return held

        with ThreadPoolExecutor(len(ranks)) as threads:
            return [[*step] for step in zip(*threads.map(work, ranks), strict=True)]

    def _step(self, rank: int) -> None:
        """As `executors.peer` and `executors.nccl` queue it."""
        if self._finishing:
            self._finishing[rank]()
            return
        pull = self.pulls[rank]
        pull()
        for part, exchange in enumerate(self.programs[rank].exchanges, 1):
            if self._early:
                pull(part)
            self._exchange(rank, exchange)
            if not self._early:
                pull(part)

    def _exchange(self, rank: int, exchange: list[ir.Send | ir.Recv]) -> None:
        buffers = {ir.OWN: self.buffers[rank], ir.LANDING: self.pulls[rank].landed}
        for _, peer, source in (i for i in exchange if isinstance(i, ir.Send)):
            self._mail[rank, peer].put(self.buffers[rank][source.first : source.stop].copy())
        for _, peer, into in (i for i in exchange if isinstance(i, ir.Recv)):
            buffers[into.buffer][into.first : into.stop] = self._mail[peer, rank].get(timeout=60)

    @property
    def late(self) -> list[tuple[int, int] | None]:
        """Of each rank: whom it waited for in vain, and in which round."""
        return [pull.timed_out_peer() for pull in self.pulls]

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *exception: object) -> None:
        """Free the windows."""
        for runtime, address in zip(self.runtimes, self._windows, strict=True):
            runtime.withdraw(address)
