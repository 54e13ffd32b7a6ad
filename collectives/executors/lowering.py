"""What executors share: a rank's program for a buffer, its regions as arrays, its messages, started from C or
from Python. And a program lowered to the instructions that `kernels/cpu/step.c` runs: addresses in place of
regions.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from treeattn.collectives.check import Certificate, prove
from treeattn.collectives.program import (
    LANDING,
    OWN,
    Await,
    Copy,
    Fold,
    Instruction,
    Program,
    Publish,
    Recv,
    Region,
    Send,
    in_place,
    plan,
)
from treeattn.collectives.runtime.memory import Array, PeerArray, Requests
from treeattn.collectives.runtime.reducer import Messages, ReductionSpec
from treeattn.collectives.schedule import Schedule
from treeattn.errors import ScheduleError

if TYPE_CHECKING:
    from treeattn.collectives.executors.slots import Slots
    from treeattn.collectives.runtime import nccl
    from treeattn.collectives.runtime.communicator import Communicator

# enum kind of kernels/cpu/step.c.
START, WAIT, PUBLISH, AWAIT, COPY, MERGE = range(6)

# struct instruction of kernels/cpu/step.c. amount: bytes to copy, or records to merge.
_LAYOUT = np.dtype([("kind", "i4"), ("requests", "i4"), ("into", "u8"), ("source", "u8"), ("amount", "i8")])
_Row = tuple[int, int, int, int, int]

# Bytes of a piece at least, and pieces at most: a flag takes as long as some lines between two cores.
_PIECE, _PIECES = 4096, 4


class StepStruct(ctypes.Structure):
    """struct step of kernels/cpu/step.c."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("startall", "testall", "iprobe", "merge")]
        + [("programs", ctypes.c_void_p * 2)]
        + [(name, ctypes.c_void_p) for name in ("statuses", "comm")]
        + [(name, ctypes.c_int64) for name in ("length", "next", "number", "spins", "awake", "width")]
        + [(name, ctypes.c_int32) for name in ("any_source", "any_tag", "code", "result")]
    )


class Planned(NamedTuple):
    """The program of one rank, what is proved of it, and what it works on.

    records: [records, width], the rank's own. sent: (destination, bytes) of every message, through shared
    memory too.
    """

    name: str
    certificate: Certificate
    program: Program
    records: Array
    sent: list[tuple[int, int]]


def plan_program(
    spec: ReductionSpec, schedule: Schedule, node: Iterable[int] = (), *, piecewise: bool = False
) -> Planned:
    """Plan this rank's program; node: the ranks that read one another's memory, perhaps piece by piece.

    Raises `ScheduleError`, before anything is allocated, if the schedule is for another number of ranks or is
    not a correct reduction, or if the buffer does not fit.
    """
    comm: Communicator | nccl.NcclCommunicator = spec.comm
    rank, size = comm.rank, comm.size
    if schedule.size != size:
        raise ScheduleError(
            f"{schedule.name}: made for {schedule.size} ranks, the communicator has {size}; "
            f"run it on {schedule.size}, or build one with size={size}"
        )
    records = spec.records(schedule.name)
    pieces = min(records.nbytes // _PIECE, _PIECES) if piecewise else 1
    made, proved, messages = _planned(schedule, rank, len(records), spec.granularity, tuple(node), pieces)
    bytes_each = records.nbytes // max(len(records), 1)
    sent = [(peer, count * bytes_each) for peer, count in messages]
    bits = getattr(spec.operator, "bits", proved.bits)
    certificate = proved if bits == proved.bits else replace(proved, bits=bits)
    return Planned(schedule.name, certificate, made, records, sent)


@lru_cache(maxsize=64)
def _planned(
    schedule: Schedule, rank: int, count: int, granularity: int, node: tuple[int, ...], pieces: int
) -> tuple[Program, Certificate, tuple[tuple[int, int], ...]]:
    """Program, proof, and (destination, records) of what the rank sends."""
    proof = prove(schedule)
    own = [each for each in schedule.traffic(count, granularity) if each.src == rank]
    made = plan(schedule, proof, rank, count, granularity=granularity, node=node, pieces=pieces)
    sent = tuple((each.dst, each.records) for each in own)
    return made, proof.certificate, sent


class Regions:
    """Own records and the landing place of a program as arrays [records, width]."""

    def __init__(self, own: Array, landing: Array) -> None:
        self.buffers = {OWN: own, LANDING: landing}

    def array(self, region: Region) -> Array:
        """The records of a region."""
        return self.buffers[region.buffer][region.first : region.stop]

    def messages(self, instructions: Sequence[Instruction]) -> tuple[list[PeerArray], list[PeerArray]]:
        """The messages of a round as (array, peer): what arrives, and what leaves."""
        arriving = [(self.array(i.into), i.peer) for i in instructions if isinstance(i, Recv)]
        return arriving, [(self.array(i.source), i.peer) for i in instructions if isinstance(i, Send)]


def messages_over(comm: Any, name: str) -> Messages:
    """Those of a communicator's library, of no round yet; its ranks need not have the other one. name: of the
    schedule. Collective."""
    if getattr(comm, "library", "mpi") == "torch":
        from treeattn.collectives.runtime.torch_communicator import TorchMessages

        return TorchMessages(comm, name)
    from treeattn.collectives.runtime.mpi_communicator import MpiMessages

    return MpiMessages(comm, name)


def landing_records(program: Program) -> int:
    """Records of the landing place, with room behind it for sums that begin in a slot of another rank."""
    folds = (i for i in program.instructions if isinstance(i, Fold))
    return program.landing + max((fold.into.records for fold in folds if _sums_in_slot(fold)), default=0)


def _sums_in_slot(fold: Fold) -> bool:
    """Whether several sources fold before the own records, the first of them in a slot: never written to."""
    return fold.sources.index(fold.into) > 1 and fold.sources[0].buffer >= 0


class Lowered:
    """Instructions of even and of odd steps, which differ in their slots only, and the round of each."""

    def __init__(
        self, program: Program, regions: Regions, slots: Slots | None, requests: Mapping[int, Requests]
    ) -> None:
        """regions: of own records and of a landing place of `landing_records`. requests: of each round with
        messages."""
        self._program, self._slots, self._requests = program, slots, requests
        self._buffers = regions.buffers
        self._record_bytes = self._buffers[OWN][:1].nbytes
        self._bases = {buffer: array.ctypes.data for buffer, array in self._buffers.items()}
        even, odd = (list(self._rows(parity)) for parity in (0, 1))
        self.rounds = [number for number, _ in even]
        self.arrays = tuple(np.array([row for _, row in rows], _LAYOUT) for rows in (even, odd))

    @property
    def addresses(self) -> ctypes.Array[ctypes.c_void_p]:
        """The addresses of both, as `StepStruct.programs` takes them."""
        return (ctypes.c_void_p * 2)(*(array.ctypes.data for array in self.arrays))

    def _rows(self, parity: int) -> Iterator[tuple[int, _Row]]:
        """The rows of all rounds, each with its number. Messages start first and are waited for last."""
        for number, instructions in self._program.by_round:
            if number in self._requests:
                yield number, self._messages(START, number)
            for instruction in instructions:
                for row in self._lowered(instruction, parity):
                    yield number, row

    def _lowered(self, i: Instruction, parity: int) -> Iterator[_Row]:
        if isinstance(i, Publish):
            yield PUBLISH, 0, self._flag(self._program.rank, i, parity), 0, 0
        elif isinstance(i, Await):
            for rank in i.ranks:
                yield AWAIT, 0, self._flag(rank, i, (parity + i.steps_ago) % 2), 0, i.steps_ago
            if i.round in self._requests:
                yield self._messages(WAIT, i.round)
        elif isinstance(i, Copy):
            yield self._copy(i.into, i.source, parity)
        elif isinstance(i, Fold):
            yield from self._fold(i, parity)

    def _fold(self, fold: Fold, parity: int) -> Iterator[_Row]:
        if _sums_in_slot(fold):
            first, *others = fold.sources
            place = Region(LANDING, self._program.landing, first.records)
            yield self._copy(place, first, parity)
            fold = fold._replace(sources=(place, *others))
        for into, sources in in_place(fold):
            for source in sources:
                yield MERGE, 0, self._address(into, parity), self._address(source, parity), into.records

    def _messages(self, kind: int, number: int) -> _Row:
        return kind, self._requests[number].number, self._requests[number].address, 0, 0

    def _copy(self, into: Region, source: Region, parity: int) -> _Row:
        size = into.records * self._record_bytes
        return COPY, 0, self._address(into, parity), self._address(source, parity), size

    def _flag(self, rank: int, i: Publish | Await, parity: int) -> int:
        assert self._slots is not None
        return self._slots.flag(rank, i.round + i.piece * self._program.rounds, parity)

    def _address(self, region: Region, parity: int) -> int:
        base = self._bases.get(region.buffer)
        if base is None:
            assert self._slots is not None
            base = self._slots.records(region.buffer, parity)
        return base + region.first * self._record_bytes
