"""All ranks of one node in one process: their programs, and all memory that these work on, in one block."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from treeattn.backends.cpu import MergeOperator
from treeattn.collectives.executors import instructions, rounds, slots
from treeattn.collectives.executors.instructions import Program, Requests, Step
from treeattn.collectives.reducer import Reduction
from treeattn.collectives.schedule import Schedule

_LINE = 128


class Arena:
    """A `treeattn.collectives.memory.Memory` of which everything lies in one block, so that it can move."""

    def __init__(self, size: int = 1 << 26) -> None:
        self.block, self.used = np.zeros(size + _LINE, np.uint8), 0
        self.block = self.block[-self.block.ctypes.data % _LINE :]

    def empty(self, shape, dtype):
        begin, size = self.used, int(np.prod(shape)) * np.dtype(dtype).itemsize
        self.used += -(-size // _LINE) * _LINE
        assert self.used <= len(self.block)
        return self.block[begin : begin + size].view(dtype).reshape(shape)

    def copy(self, into, source):
        np.copyto(into, source)

    def synchronize(self):
        """Nothing is queued."""


class OneSet(slots.Layout):
    """What must not be: even and odd steps use the same slots."""

    def offset(self, number, source, chunks, parity):
        return super().offset(number, source, chunks, 0)


class VirtualRank(NamedTuple):
    records: np.ndarray
    program: Program


class VirtualNode(NamedTuple):
    arena: Arena
    ranks: list[VirtualRank]
    operator: MergeOperator


def virtual_node(schedule: Schedule, records: int, head_dim: int = 8, layout=slots.Layout) -> VirtualNode:
    """The programs of all ranks of `schedule`, which share their memory."""
    arena, operator = Arena(), MergeOperator(head_dim)
    node = tuple(range(schedule.size))
    placed = layout(schedule, node, records, operator.width * 4)
    parts = {rank: arena.empty(2 * placed.sizes[rank], np.uint8).ctypes.data for rank in node}
    ranks = []
    for rank in node:
        buffer = arena.empty((records, operator.width), np.float32)
        comm = SimpleNamespace(rank=rank, size=schedule.size)
        planned = list(rounds.plan(Reduction(comm, operator, buffer, 1, arena), schedule)[1])
        none = [Requests(0, 0)] * len(planned)
        program = instructions.lay_out(planned, none, slots.Slots(rank, placed, parts))
        ranks.append(VirtualRank(buffer, program))
    return VirtualNode(arena, ranks, operator)


def steps(node: VirtualNode):
    """Of each rank, a call that goes on with its step as far as it can: 0 when that is done."""
    native = node.operator.native_code()
    run = ctypes.CFUNCTYPE(ctypes.c_int64)(native.run_step)
    made = [
        Step(
            merge=native.merge,
            programs=rank.program.addresses,
            length=len(rank.program.round_at),
            number=1,
            width=node.operator.width,
        )
        for rank in node.ranks
    ]
    return [lambda step=step: run(ctypes.byref(step), ctypes.c_int64(0)) for step in made]
