"""Runs a schedule as a compiled program whose ranks read one another's records in memory that they share.

What a rank sends to ranks of its node goes into slots of its own, and a flag with the number of the step
publishes a round of them. Receivers wait for the number and merge straight out of the slots. Everything else
is as in `executors/compiled.py`: messages between nodes, the order of merges, the bits.

There are two sets of slots, for even and odd steps, and no barrier. A rank in step s + 2 overwrites what it
published in step s. It has a result of step s + 1 that depends on every rank, so every rank had begun step
s + 1 and was done with reading in step s. Where that is not so
(`Certificate.min_records_for_double_buffering`), ranks announce each step, in the flags of round 0, to those
that they read from, who wait for it before they write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from treeattn.collectives.executors import compiled
from treeattn.collectives.executors import planned as planning
from treeattn.collectives.program import Program
from treeattn.collectives.runtime import shared_memory
from treeattn.collectives.runtime.reducer import ReductionSpec
from treeattn.collectives.runtime.shared_memory import Part
from treeattn.collectives.schedule import Schedule

# Two cache lines: processors fetch them in pairs. A flag has them for itself.
_LINE = 128


class Slots:
    """Two sets of slots of every rank of a node, each a line for the flag of every round, then records."""

    def __init__(self, parts: Mapping[int, Part], program: Program, record_bytes: int) -> None:
        """parts: of two sets, zeros, of all ranks of the node."""
        self._parts, self._flags = parts, _flag_bytes(program)
        self._set = set_bytes(program, record_bytes)
        self._addresses = {rank: part.memory.ctypes.data for rank, part in parts.items()}

    def flag(self, rank: int, round_: int, parity: int) -> int:
        """Address of the flag of a round, from 0, of even (parity 0) or odd (1) steps."""
        return self._addresses[rank] + parity * self._set + round_ * _LINE

    def records(self, rank: int, parity: int) -> int:
        """Address of the records of a set."""
        return self._addresses[rank] + parity * self._set + self._flags

    def ended(self) -> list[int]:
        """The ranks whose process has ended."""
        return [rank for rank, part in self._parts.items() if part.owner.ended]


def _flag_bytes(program: Program) -> int:
    return (program.rounds + 1) * _LINE


def set_bytes(program: Program, record_bytes: int) -> int:
    """Bytes of one set of slots of any rank of a node."""
    return _flag_bytes(program) + -(-program.slots * record_bytes // _LINE) * _LINE


def plan(
    spec: ReductionSpec,
    schedule: Schedule,
    *,
    nodes: tuple[tuple[int, ...], ...],
    oversubscribed: bool = False,
    messages: Callable[[Any, str, Program], compiled.Messages] | None = None,
) -> compiled.Reducer:
    """As `compiled.plan`, with shared memory between the ranks of each node. Collective.

    nodes: ranks that share memory, the same on every rank. messages: makes those between nodes, of the
    communicator, the schedule's name and the program; MPI's unless given. Raises `SharingError` where ranks
    of a node cannot, on every rank alike.
    """
    node = next(node for node in nodes if spec.comm.rank in node)
    planned = planning.plan(spec, schedule, node)
    record_bytes = planned.records[:1].nbytes
    parts = shared_memory.share(spec.comm, node, 2 * set_bytes(planned.program, record_bytes))
    if messages is None:
        from treeattn.collectives.executors.mpi_messages import MpiMessages

        messages = MpiMessages
    sending = messages(spec.comm, planned.name, planned.program)
    slots = Slots(parts, planned.program, record_bytes)
    return compiled.Reducer(spec, planned, sending, slots, oversubscribed)
