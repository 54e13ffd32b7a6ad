"""What a planned round becomes in a flat program: the instructions that `kernels/cpu/step.c` runs.

Ranks that share memory need no messages among themselves. What one of them sends goes into a slot: records
behind a flag with the number of the step. Who receives it waits for the flag, then merges straight out of the
slot.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from treeattn.collectives.executors.rounds import Action, Copy, Merge, Message, RankRound

__all__ = ["NOBODY", "Near", "Program", "Requests", "Slot", "Step", "by_message", "lay_out"]

# enum kind of kernels/cpu/step.c.
START, WAIT, PUBLISH, AWAIT, COPY, MERGE = range(6)

# struct instruction of kernels/cpu/step.c.
_LAYOUT = np.dtype([("kind", "i4"), ("requests", "i4"), ("into", "u8"), ("source", "u8"), ("amount", "i8")])


class Instruction(NamedTuple):
    """struct instruction of kernels/cpu/step.c. amount: bytes to copy, or records to merge."""

    kind: int
    requests: int = 0
    into: int = 0
    source: int = 0
    amount: int = 0


class Step(ctypes.Structure):
    """struct step of kernels/cpu/step.c."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("startall", "testall", "iprobe", "merge")]
        + [("programs", ctypes.c_void_p * 2)]
        + [(name, ctypes.c_void_p) for name in ("statuses", "comm")]
        + [(name, ctypes.c_int64) for name in ("length", "next", "number", "looks", "width")]
        + [(name, ctypes.c_int32) for name in ("any_source", "any_tag", "code", "result")]
    )


class Requests(NamedTuple):
    """Handles of the requests of a round, side by side."""

    address: int
    number: int


class Slot(NamedTuple):
    """Addresses of a flag, and of the records behind it."""

    flag: int
    records: int


class Near(Protocol):
    """The ranks that share memory with this one, and the slots there."""

    #: This rank.
    rank: int

    def __contains__(self, rank: int) -> bool:
        """Whether that rank is one of them."""

    def slot(self, number: int, source: int, chunks: range, parity: int) -> Slot:
        """Where `source` puts `chunks` in round `number` of even (parity 0) or odd (1) steps."""


class _Nobody:
    """Every rank is reached by messages."""

    rank = -1

    def __contains__(self, rank: int) -> bool:
        return False

    def slot(self, number: int, source: int, chunks: range, parity: int) -> Slot:
        raise LookupError(f"rank {source} shares no memory with this one")


NOBODY = _Nobody()


class Program(NamedTuple):
    """One rank's instructions for even and for odd steps, which differ in their slots only, as they lie in
    memory; and the index of the round that each of them belongs to."""

    arrays: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
    round_at: list[int]

    @property
    def addresses(self) -> Any:
        """Of both, as `Step.programs` takes them."""
        return (ctypes.c_void_p * 2)(*map(_address, self.arrays))


def lay_out(planned: list[RankRound], requests: list[Requests], near: Near) -> Program:
    """The program of these rounds. requests: of each, for the messages that MPI carries."""
    even: list[Instruction] = []
    odd: list[Instruction] = []
    round_at: list[int] = []
    for index, (round_, of_mpi) in enumerate(zip(planned, requests, strict=True)):
        even += _of_round(round_, of_mpi, near, 0)
        odd += _of_round(round_, of_mpi, near, 1)
        round_at += [index] * (len(even) - len(round_at))
    return Program((np.array(even, _LAYOUT), np.array(odd, _LAYOUT)), round_at)


def by_message(messages: list[Message], near: Near) -> list[Message]:
    """Those that MPI carries."""
    return [message for message in messages if message.peer not in near]


def _of_round(round_: RankRound, requests: Requests, near: Near, parity: int) -> Iterator[Instruction]:
    """Messages start first and are waited for last: they take longest."""
    number = round_.number
    if requests.number:
        yield Instruction(START, requests.number, requests.address)
    leaving = {
        near.slot(number, near.rank, m.chunks, parity): m.array for m in round_.sends if m.peer in near
    }
    for slot, array in leaving.items():  # one slot for all who receive the same
        yield Instruction(COPY, into=slot.records, source=_address(array), amount=array.nbytes)
        yield Instruction(PUBLISH, into=slot.flag)
    arriving = [
        (m.array, near.slot(number, m.peer, m.chunks, parity)) for m in round_.receives if m.peer in near
    ]
    for _, slot in arriving:
        yield Instruction(AWAIT, into=slot.flag)
    if requests.number:
        yield Instruction(WAIT, requests.number, requests.address)
    yield from _fold(round_.actions, arriving)


def _fold(actions: list[Action], arriving: list[tuple[Any, Slot]]) -> Iterator[Instruction]:
    """The actions, reading slots where a message would have landed.

    What is written to, or is nothing but the place where a copy belongs, is copied first: nobody may write
    into the slot of another rank, which others read too.
    """
    steps = [step for action in actions for step in _steps(action)]
    read_in_place: list[tuple[range, int]] = []
    for array, slot in arriving:
        landing = range(_address(array), _address(array) + array.nbytes)
        read = any(step.source in landing for step in steps)
        if read and not any(step.into in landing for step in steps):
            read_in_place.append((landing, slot.records - landing.start))
        else:
            yield Instruction(COPY, into=landing.start, source=slot.records, amount=array.nbytes)
    for step in steps:
        shift = next((shift for landing, shift in read_in_place if step.source in landing), 0)
        yield step._replace(source=step.source + shift)


def _steps(action: Action) -> Iterator[Instruction]:
    into = _address(action.into)
    if isinstance(action, Copy):
        yield Instruction(COPY, into=into, source=_address(action.source), amount=action.into.nbytes)
        return
    for other in [action.other] if isinstance(action, Merge) else action.others:
        yield Instruction(MERGE, into=into, source=_address(other), amount=len(action.into))


def _address(array: Any) -> int:
    address: int = array.ctypes.data
    return address
