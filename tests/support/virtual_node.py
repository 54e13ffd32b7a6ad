"""The lowered programs of all ranks of a node, and their memory, in one block that can move."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from tests.support.reducer_contract import OPERATOR
from treeattn.collectives.executors.lowering import Addresses, Lowered, landing_records, lower, plan_program
from treeattn.collectives.executors.slots import SharedPart, Slots, set_bytes
from treeattn.collectives.runtime.reducer import ReductionSpec

LINE = 128


class Block:
    """Arrays of one block, each on lines of its own."""

    def __init__(self, size: int = 1 << 22) -> None:
        whole = np.zeros(size + LINE, np.uint8)
        self.bytes, self.used = whole[-whole.ctypes.data % LINE :], 0

    def empty(self, shape, dtype=np.float32):
        begin, size = self.used, int(np.prod(shape)) * np.dtype(dtype).itemsize
        self.used += -(-size // LINE) * LINE
        assert self.used <= len(self.bytes)
        return self.bytes[begin : begin + size].view(dtype).reshape(shape)


class VirtualRank(NamedTuple):
    records: np.ndarray
    lowered: Lowered


def virtual_node(schedule, records, slots=Slots):
    """The block, and every rank of `schedule`: all of them share their memory."""
    block, node = Block(), tuple(range(schedule.size))
    buffers = [block.empty((records, OPERATOR.width)) for _ in node]
    comms = [SimpleNamespace(rank=rank, size=schedule.size) for rank in node]
    plans = [
        plan_program(ReductionSpec(comm, OPERATOR, buffer), schedule, node)
        for comm, buffer in zip(comms, buffers, strict=True)
    ]
    row = OPERATOR.width * 4
    parts = {
        rank: SharedPart(block.empty(2 * set_bytes(plans[0].program, row), np.uint8), None) for rank in node
    }
    ranks = []
    for planned, buffer in zip(plans, buffers, strict=True):
        landing = block.empty((landing_records(planned.program), OPERATOR.width))
        addresses = buffer.ctypes.data, landing.ctypes.data, slots(parts, planned.program, row), row
        ranks.append(VirtualRank(buffer, lower(planned.program, Addresses(*addresses), {})))
    return block, ranks
