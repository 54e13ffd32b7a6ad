"""Runs one schedule as a program in which the ranks of a node read each other's records in shared memory.

What a rank sends to ranks of its node goes into a slot of its own: records behind a flag that holds the
number of the step. Receivers wait for the number and merge straight out of the slot. Everything else is as in
`executors/program.py`: messages between nodes, the order of merges, the bits.

There are two sets of slots, for even and odd steps, and no barrier. A rank in step s + 2 overwrites what it
published in step s. It has a result of step s + 1 that counts every rank, so every rank had begun step s + 1
and was done with reading in step s. Where a result may count nobody (`Certificate.in_step_from`), slots are
refused.
"""

from __future__ import annotations

from collections.abc import Mapping

from treeattn.collectives.executors import program, shared_memory
from treeattn.collectives.executors.instructions import Near, Slot
from treeattn.collectives.reducer import Reduction
from treeattn.collectives.schedule import Schedule
from treeattn.errors import RestrictionError, TransportError

__all__ = ["Layout", "Reducer", "Slots"]

# Two cache lines: processors fetch them in pairs. A flag has them for itself.
_LINE = 128


class Layout:
    """Where each rank of a node puts what it sends to the others. It follows from the schedule alone."""

    def __init__(self, schedule: Schedule, node: tuple[int, ...], rows: int, row_bytes: int) -> None:
        """rows: what chunks are cut from."""
        members = frozenset(node)
        self._offsets: dict[tuple[int, int, range], int] = {}
        #: Bytes of one set of each rank.
        self.sizes = dict.fromkeys(node, 0)
        for number, round_ in enumerate(schedule.rounds):
            for t in round_:
                part = schedule.chunk_slice(t.chunks, rows)
                key = number, t.src, t.chunks
                if part.stop == part.start or key in self._offsets or not {t.src, t.dst} <= members:
                    continue
                self._offsets[key] = self.sizes[t.src]
                self.sizes[t.src] += _LINE + _lines((part.stop - part.start) * row_bytes)

    def offset(self, number: int, source: int, chunks: range, parity: int) -> int:
        """Bytes from the beginning of the source's part to the flag; the records follow a `_LINE` later."""
        return parity * self.sizes[source] + self._offsets[number, source, chunks]


class Slots:
    """The slots of one rank and of those near it, as `instructions.Near` takes them."""

    def __init__(self, rank: int, layout: Layout, parts: Mapping[int, int]) -> None:
        """parts: rank -> address of its part, of all ranks of the node."""
        self.rank = rank
        self._layout, self._parts = layout, parts

    def __contains__(self, rank: int) -> bool:
        """Whether it is of this node."""
        return rank in self._parts

    def slot(self, number: int, source: int, chunks: range, parity: int) -> Slot:
        """Addresses in the part of `source`."""
        flag = self._parts[source] + self._layout.offset(number, source, chunks, parity)
        return Slot(flag, flag + _LINE)


class Reducer(program.Reducer):
    """As `executors.program.Reducer`. Raises `SharingError` where ranks of a node cannot share memory, and
    `RestrictionError` where two sets of slots are not enough, both on every rank alike."""

    executor = "slots"

    def __init__(
        self,
        reduction: Reduction,
        schedule: Schedule,
        *,
        nodes: tuple[tuple[int, ...], ...],
        crowded: bool = False,
    ) -> None:
        """nodes: ranks that share memory, the same on every rank."""
        self._node = next(node for node in nodes if reduction.comm.rank in node)
        super().__init__(reduction, schedule, crowded=crowded)

    def _meet(self, reduction: Reduction, schedule: Schedule) -> Near:
        records = reduction.records(schedule.name)
        rows, rank = len(records) // reduction.group, reduction.comm.rank
        assert self.certificate is not None
        least = self.certificate.in_step_from
        if rows < least:
            raise RestrictionError(
                f"{schedule.name}: with {rows} records some rank gets none, and could overwrite what others "
                f"still read; shared memory is for {least} or more"
            )
        layout = Layout(schedule, self._node, rows, records[:1].nbytes * reduction.group)
        self._parts = shared_memory.share(reduction.comm, self._node, 2 * layout.sizes[rank])
        addresses = {near: part.memory.ctypes.data for near, part in self._parts.items()}
        return Slots(rank, layout, addresses)

    def _release(self) -> None:
        super()._release()
        self._parts = {}  # mapped for as long as they are known

    def _look_around(self) -> None:
        """Who has ended publishes nothing any more."""
        super()._look_around()
        ended = [rank for rank, part in self._parts.items() if part.owner.ended]
        if ended:
            round_ = self._at()
            awaited = {message.peer for message in round_.receives} if round_ else set()
            rank = min(ended, key=lambda rank: (rank not in awaited, rank))  # others may have ended after it
            what, peers = self.waits_for()
            raise TransportError(f"{what}: rank {rank} has ended, while this one waits for {peers}")


def _lines(size: int) -> int:
    return -(-size // _LINE) * _LINE
