"""Slots: memory that ranks of a node share, so that a compiled program reads one another's records in place.

What a rank sends to ranks of its node goes into slots of its own, and a flag with the number of the step
publishes a round of them. Receivers wait for the number and merge straight out of the slots. Everything else
is as in `executors/compiled.py`: messages between nodes, the order of merges, the bits.

There are two sets of slots, for even and odd steps, and no barrier. A rank in step s + 2 overwrites what it
published in step s. It has a result of step s + 1 that depends on every rank, so every rank had begun step
s + 1 and was done with reading in step s. Where that is not so
(`Certificate.min_records_for_double_buffering`), ranks announce each step, in the flags of round 0, to those
that they read from, who wait for it before they write.

Memory that ranks share is a file in memory without a name (memfd_create): each rank owns a part, which the
others open by way of the owner's process and read. Nothing is left behind whatever happens to a rank, and no
/dev/shm is needed. Where ranks cannot share, as in containers of their own, all ranks hear of it.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np

from treeattn.collectives.program import Program
from treeattn.collectives.runtime import watchdog
from treeattn.collectives.runtime.communicator import Communicator
from treeattn.collectives.runtime.process import Process
from treeattn.errors import SharingError

T = TypeVar("T")
Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_FAILED = ctypes.c_void_p(-1).value  # of mmap

# In another container the number may be of anything there: a pipe, which would be waited for, or a terminal.
_TO_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY

_HEADER = 128  # bytes: a token, by which a part is known, and what keeps the rest aligned

# Two cache lines: processors fetch them in pairs. A flag has them for itself.
_LINE = 128


class Slots:
    """Two sets of slots of every rank of a node: a line for each flag, of rounds and pieces, then records."""

    def __init__(self, parts: Mapping[int, SharedPart], program: Program, record_bytes: int) -> None:
        """parts: of two sets, zeros, of all ranks of the node."""
        self._parts, self._flags = parts, _flag_bytes(program)
        self._set = set_bytes(program, record_bytes)
        self._addresses = {rank: part.memory.ctypes.data for rank, part in parts.items()}

    def flag(self, rank: int, number: int, parity: int) -> int:
        """Address of a flag, from 0, of even (parity 0) or odd (1) steps."""
        return self._addresses[rank] + parity * self._set + number * _LINE

    def records(self, rank: int, parity: int) -> int:
        """Address of the records of a set."""
        return self._addresses[rank] + parity * self._set + self._flags

    def ended(self, among: Collection[int] | None = None) -> list[int]:
        """The ranks of the node whose process has ended, of all or among these."""
        parts = self._parts.items()
        return [
            rank for rank, part in parts if (among is None or rank in among) and part.owner.state == "ended"
        ]


def _flag_bytes(program: Program) -> int:
    return (program.rounds * program.pieces + 1) * _LINE


def set_bytes(program: Program, record_bytes: int) -> int:
    """Bytes of one set of slots of any rank of a node."""
    return _flag_bytes(program) + -(-program.slots * record_bytes // _LINE) * _LINE


def slots_of_node(comm: Communicator, node: Iterable[int], program: Program, record_bytes: int) -> Slots:
    """Slots of the ranks of this rank's node. Collective; raises as `share`."""
    return Slots(share(comm, node, 2 * set_bytes(program, record_bytes)), program, record_bytes)


class SharedPart(NamedTuple):
    """The memory of one rank, zeros at first. Nobody else can write there."""

    memory: Bytes
    owner: Process


class _Offer(NamedTuple):
    """What a rank tells the others of its part."""

    owner: Process
    descriptor: int
    size: int
    token: bytes


def share(comm: Communicator, node: Iterable[int], size: int) -> dict[int, SharedPart]:
    """A part of `size` bytes for this rank, and those of the other ranks of its node. Collective.

    Raises `SharingError`, on every rank of `comm`, where one cannot share memory with its node.
    """
    made, problem = _attempt(lambda: _made(size, comm.members[comm.rank].process))
    try:
        offers = _everywhere(comm, problem, made and made[0])
        others = [rank for rank in node if rank != comm.rank]
        opened, problem = _attempt(lambda: {rank: _opened(rank, offers[rank]) for rank in others})
        _everywhere(comm, problem, None)  # and the others have opened what this rank offers
    finally:
        if made is not None:
            os.close(made[0].descriptor)
    assert made is not None
    assert opened is not None
    return opened | {comm.rank: SharedPart(made[1], made[0].owner)}


def _made(size: int, owner: Process) -> tuple[_Offer, Bytes]:
    """A part of this rank's own."""
    descriptor = os.memfd_create("treeattn", os.MFD_CLOEXEC)
    try:
        # Room now or an error, not a signal at the first write.
        os.posix_fallocate(descriptor, 0, _HEADER + size)
        memory = _mapped(descriptor, size, mmap.PROT_READ | mmap.PROT_WRITE)
    except BaseException:
        os.close(descriptor)
        raise
    token = os.urandom(_HEADER)
    memory[:_HEADER] = np.frombuffer(token, np.uint8)
    return _Offer(owner, descriptor, size, token), memory[_HEADER:]


def _opened(rank: int, offer: _Offer) -> SharedPart:
    """The part of another rank, to read."""
    try:
        descriptor = os.open(f"/proc/{offer.owner.number}/fd/{offer.descriptor}", _TO_READ)
        try:
            memory = _mapped(descriptor, offer.size, mmap.PROT_READ)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        reason = f"the memory of rank {rank} cannot be opened, as in another container ({error})"
        raise OSError(reason) from error
    if memory[:_HEADER].tobytes() != offer.token:
        raise OSError(f"rank {rank} is in another container")
    return SharedPart(memory[_HEADER:], offer.owner)


def _mapped(descriptor: int, size: int, protection: int) -> Bytes:
    """Without Python's `mmap`, which keeps a file open for as long as it lives: as many as ranks on the node
    for every decoder, where a process may have 1024."""
    size += _HEADER
    if os.fstat(descriptor).st_size < size:
        raise ValueError("it is smaller than was said")
    library = _library()
    address = library.mmap(None, size, protection, mmap.MAP_SHARED, descriptor, 0)
    if address == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    memory = (ctypes.c_uint8 * size).from_address(address)
    # Not at exit: a thread may still be at work there.
    weakref.finalize(memory, library.munmap, address, size).atexit = False
    array = np.frombuffer(memoryview(memory), np.uint8)
    array.flags.writeable = bool(protection & mmap.PROT_WRITE)
    return array


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return library


def _attempt(make: Callable[[], T]) -> tuple[T | None, str | None]:
    """What it makes, or why it cannot."""
    try:
        return make(), None
    except (OSError, ValueError, AttributeError, MemoryError) as error:  # the third: no memfd_create here
        return None, f"{error}" or repr(error)


def _everywhere(comm: Communicator, problem: str | None, shared: Any) -> list[Any]:
    """What every rank shares; where one has a problem, every rank raises the same."""
    with watchdog.Activity("sharing memory within nodes"):
        views = comm.allgather((problem, shared))
    for rank, (problem, _) in enumerate(views):
        if problem is not None:
            raise SharingError(f"rank {rank}: {problem}")
    return [shared for _, shared in views]
