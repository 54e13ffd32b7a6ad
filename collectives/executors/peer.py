"""Runs one schedule within a node whose GPUs read each other's memory: a step is one kernel.

Every rank exposes a window of its memory and opens those of the others (CUDA IPC); `collectives.pulls` says
what is copied, announced, waited for and pulled there.
"""

from __future__ import annotations

from typing import NamedTuple

from treeattn.collectives import pulls, traffic, waiting
from treeattn.collectives.check import prove
from treeattn.collectives.memory import PeerMemory
from treeattn.collectives.operator import Pull, PullingOperator
from treeattn.collectives.reducer import Reducer as BaseReducer
from treeattn.collectives.reducer import Reduction, duplicate
from treeattn.collectives.schedule import Schedule
from treeattn.errors import ScheduleError, TransportError

__all__ = ["Reducer", "Window"]


class Window(NamedTuple):
    """What a rank tells the others: the handle that opens its memory, and `operator.pull_blocks` there."""

    handle: bytes
    blocks: int


class Reducer(BaseReducer):
    """A planned reduction of a buffer in the memory of a GPU, in place, over ranks that share a node.

    It is planned in three parts: creating it is collective; `expose` and `connect` are each rank's own and
    may fail on one alone: agree on both. A step is queued and not waited for. A rank that does not come in
    time leaves NaN in the records of those who wait, and `TransportError` for their next step, `synchronize`
    or `close`.

    Raises `ScheduleError` if the schedule is for another number of ranks or is not a correct reduction.
    """

    executor = "peer"
    queued = True

    def __init__(self, reduction: Reduction, schedule: Schedule) -> None:
        comm = reduction.comm
        if schedule.size != comm.size:
            raise ScheduleError(
                f"{schedule.name}: made for {schedule.size} ranks, the communicator has {comm.size}; "
                f"build it with size={comm.size}"
            )
        self.certificate, folds = prove(schedule)
        self._records = reduction.records(schedule.name)
        self._operator: PullingOperator = reduction.operator
        self._memory: PeerMemory = reduction.memory
        self._seconds = waiting.limit()
        super().__init__(schedule.name)
        self._comm = duplicate(comm)
        count, group = len(self._records), reduction.group
        self._program = pulls.plan(schedule, folds, comm.rank, count, group)
        bytes_each = self._records.nbytes // max(count, 1)
        self.sent = [
            (message.dst, message.records * bytes_each)
            for message in traffic.messages(schedule, count, group)
            if message.src == comm.rank
        ]
        self._window = 0  # address; there is none at 0
        self._opened: list[int] = []
        self._pull: Pull | None = None  # a rank alone has nothing to do

    @property
    def blocking(self) -> int:
        """Never: a step is queued, and the kernel minds the time."""
        return 0

    def expose(self) -> Window:
        """This rank's window. Raises `TransportError`, `BackendError`."""
        handle = b""
        if self._comm.size > 1:
            self._window, handle = self._memory.expose(self._operator.window_bytes(self._program))
        return Window(handle, self._operator.pull_blocks(len(self._records)))

    def connect(self, windows: list[Window]) -> None:
        """Open the windows of all ranks. Raises `TransportError`, which names the rank, `BackendError`."""
        if self._comm.size == 1:
            return
        addresses = [self._open(rank, window.handle) for rank, window in enumerate(windows)]
        blocks = min(window.blocks for window in windows)
        self._pull = self._operator.planned_pull(
            self._records, self._program, self._comm.rank, addresses, self._seconds, blocks
        )

    def _open(self, rank: int, handle: bytes) -> int:
        if rank == self._comm.rank:
            return self._window
        try:
            address = self._memory.open_exposed(handle)
        except TransportError as error:
            raise TransportError(f"the memory of rank {rank} cannot be opened: {error}") from error
        self._opened.append(address)
        return address

    def _check(self) -> None:
        super()._check()
        self._raise_if_late()

    def _raise_if_late(self) -> None:
        late = self._pull and self._pull.late()
        if late:
            what = f"{self.name}, round {late[1]}"
            raise TransportError(waiting.overdue(what, f"rank {late[0]}", self._seconds))

    def _begin(self) -> None:
        if self._pull:
            self._pull()

    def _complete(self) -> None:
        """The stream does the rest."""

    def synchronize(self) -> None:
        """Wait for the steps in the current stream, which end by themselves. Raises `TransportError` where
        one of them waited in vain."""
        self._memory.synchronize()
        self._raise_if_late()

    def _release(self) -> None:
        """All close what they opened before any frees what was open."""
        self._memory.synchronize_all()
        self._raise_if_late()  # then others may be lost, and what they read stays
        self._pull = None
        while self._opened:
            self._memory.close_exposed(self._opened.pop())
        everyone = self._comm.Ibarrier()
        if not waiting.until(everyone.Test, self._seconds):
            what = f"the end of {self.name}"
            raise TransportError(waiting.overdue(what, "the other ranks", self._seconds))
        if self._window:
            self._memory.withdraw(self._window)
        self._comm.Free()

    def _abandon(self) -> None:
        """Nothing: others may be reading what this rank exposes, for as long as it lives."""
