"""All ranks of a node in one process, for executors that share its memory: no message leaves it."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from unittest import mock

import numpy as np

from tests.support.reducer_contract import OPERATOR, Ranks
from treeattn.collectives.executors import compiled, slots
from treeattn.collectives.runtime import mpi_communicator
from treeattn.collectives.runtime.process import Process
from treeattn.collectives.runtime.reducer import ReductionSpec
from treeattn.mpi import communicators


class LocalRanks(Ranks):
    """Their steps go on in random order, or each in a thread of its own."""

    def __init__(self, reducers, buffers, seed):
        super().__init__(reducers, buffers)
        self._draw = np.random.default_rng(seed)

    def call(self):
        failed = []

        def run(reducer):
            try:
                reducer()
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=run, args=(reducer,)) for reducer in self.reducers.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed, failed

    def settle(self):
        left = list(self.reducers.values())
        while left:
            reducer = left[self._draw.integers(len(left))]
            if reducer.test():
                left.remove(reducer)


def plan_slots(case, buffers=None):
    """Real reducers of executor ``"slots"``, all on one node."""
    size = sum(map(len, case.nodes))
    node = tuple(range(size))
    arrays = buffers or [np.zeros((case.records, OPERATOR.width), np.float32) for _ in node]
    owner = Process.of(os.getpid())
    parts = {}

    def share(comm, ranks, size):
        for rank in ranks:
            parts.setdefault(rank, slots.SharedPart(np.zeros(size + 64, np.uint8), owner))
        return dict(parts)

    def duplicate(comm):
        return communicators.alone().dup()

    private = mock.patch.object(mpi_communicator, "duplicate", duplicate)
    with private, mock.patch.object(slots, "share", share):
        made = {}
        for rank in node:
            comm = SimpleNamespace(rank=rank, size=size)
            spec = ReductionSpec(comm, OPERATOR, arrays[rank], case.granularity)
            made[rank] = compiled.plan(spec, case.schedule, nodes=(node,), oversubscribed=True)
    return LocalRanks(made, dict(enumerate(arrays)), case.seed)
