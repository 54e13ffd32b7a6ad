"""The programs of all ranks of a schedule, run in one process in any order that they allow.

Ranks go on one instruction at a time. A message moves at any time between its start at both ends and the
first of the two waits for it; what a rank publishes is a number that only grows. So what may be overwritten
too early is, in some order.
"""

from __future__ import annotations

import random

import numpy as np

from treeattn.collectives import program as ir
from treeattn.collectives import prove
from treeattn.collectives.program import LANDING, OWN, Await, Copy, Fold, Publish, Recv, Send


class Stuck(AssertionError):
    """Ranks wait for one another."""


def programs(case):
    """Of every rank of a `schedules.Case`."""
    proof, node = prove(case.schedule), {rank: node for node in case.nodes for rank in node}
    return [
        ir.plan(case.schedule, proof, rank, case.records, granularity=case.granularity, node=node[rank])
        for rank in range(case.schedule.size)
    ]


class Model:
    """Ranks and their buffers; `sets` of slots, of which steps use one after the other."""

    def __init__(self, programs, operator, records, seed=0, sets=2):
        self._programs, self._operator, self._sets = programs, operator, sets
        self._random = random.Random(seed)
        self.held = [np.zeros((records, operator.width), operator.dtype) for _ in programs]
        garbage = np.nan if operator.dtype.kind == "f" else 1 << 60
        self._landed = [np.full((p.landing, operator.width), garbage, operator.dtype) for p in programs]
        slots = [np.full((sets, p.slots, operator.width), garbage, operator.dtype) for p in programs]
        self._slots, self._published = slots, [-1] * len(programs)
        self._posted = {}  # (src, dst) -> arrays to receive, and to send, that have not met
        self._ready = []  # those that have, and not moved
        self._open = [0] * len(programs)  # messages of each rank that have not moved

    def run(self, values):
        """What each rank holds after each step; values: of each step, of each rank."""
        results = [[] for _ in self._programs]
        going = {rank: self._steps(rank, values, results[rank]) for rank in range(len(self._programs))}
        idle = 0
        while going:
            if self._ready and self._random.random() < 0.3:
                self._move()
            rank = self._random.choice(list(going))
            came = next(going[rank], None)
            idle = 0 if came else idle + 1
            if came is None:
                del going[rank]
            elif idle > 50 * len(going):
                if not self._ready:
                    raise Stuck(f"ranks {list(going)} wait for one another")
                self._move()
        return [[result[step] for result in results] for step in range(len(values))]

    def _steps(self, rank, values, results):
        """True for every instruction that is done, False where one waits."""
        program = self._programs[rank]
        for step, of_ranks in enumerate(values):
            self.held[rank][...] = of_ranks[rank]
            for instruction in program.instructions:
                while not self._can(rank, step, instruction):
                    yield False
                self._do(rank, step, instruction)
                yield True
            results.append(self.held[rank].copy())

    def _number(self, rank, step, round_):
        return step * (self._programs[rank].rounds + 1) + round_

    def _can(self, rank, step, instruction):
        if not isinstance(instruction, Await):
            return True
        wanted = self._number(rank, step - instruction.steps_ago, instruction.round)
        return not self._open[rank] and all(self._published[other] >= wanted for other in instruction.ranks)

    def _do(self, rank, step, i):
        if isinstance(i, Send | Recv):
            sends, pair = isinstance(i, Send), (rank, i.peer) if isinstance(i, Send) else (i.peer, rank)
            array = self._array(rank, step, i.source if sends else i.into)
            self._open[rank] += 1
            waiting = self._posted.setdefault(pair, ([], []))
            waiting[sends].append(array)
            if all(waiting):
                self._ready.append((*pair, waiting[0].pop(0), waiting[1].pop(0)))
        elif isinstance(i, Publish):
            self._published[rank] = self._number(rank, step, i.round)
        elif isinstance(i, Copy):
            self._array(rank, step, i.into, writes=True)[...] = self._array(rank, step, i.source)
        elif isinstance(i, Fold):
            total, *others = (self._array(rank, step, source) for source in i.sources)
            total = total.copy()
            for other in others:
                self._operator.planned_merge(total, other.copy())()
            self._array(rank, step, i.into, writes=True)[...] = total

    def _array(self, rank, step, region, writes=False):
        buffer = region.buffer
        assert not writes or buffer in (rank, OWN, LANDING), "a rank writes to what is its own alone"
        whole = {OWN: self.held[rank], LANDING: self._landed[rank]}.get(buffer)
        if whole is None:
            whole = self._slots[buffer][step % self._sets]
        assert 0 <= region.first < region.stop <= len(whole)
        return whole[region.first : region.stop]

    def _move(self):
        """Let one of the messages that both ends have started arrive."""
        src, dst, into, source = self._ready.pop(self._random.randrange(len(self._ready)))
        assert into.shape == source.shape, f"{src} sends {source.shape}, {dst} takes {into.shape}"
        into[...] = source
        self._open[src] -= 1
        self._open[dst] -= 1
