"""Runs one schedule within a node whose GPUs read each other's memory: a step is one kernel.

Every rank exposes a window of its memory and opens those of the others (CUDA IPC); `collectives.pulls` says
what is copied, announced, waited for and pulled there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from treeattn.collectives import pulls, traffic, waiting
from treeattn.collectives.executors import rounds
from treeattn.collectives.memory import PeerMemory
from treeattn.collectives.operator import Pull, PullingOperator
from treeattn.collectives.reducer import Reducer as BaseReducer
from treeattn.collectives.reducer import Reduction, duplicate
from treeattn.collectives.schedule import Schedule
from treeattn.errors import TransportError

__all__ = ["Reducer", "Window", "Windows"]


class Window(NamedTuple):
    """What a rank tells the others: the handle that opens its memory, and `operator.pull_blocks` there."""

    handle: bytes
    blocks: int


class Windows:
    """The windows of a node's ranks, and what this one does with them in a step.

    It is planned in three parts: creating it is collective; `expose` and `connect` are each rank's own and
    may fail on one alone: agree on both. A rank that does not come in time leaves NaN in the records of those
    who wait, in all later steps too.

    Raises `ScheduleError` if the schedule is for another number of ranks or is not a correct reduction.
    """

    def __init__(self, reduction: Reduction, schedule: Schedule, nodes: pulls.Nodes) -> None:
        """nodes: ranks whose GPUs read one another's memory, the same on every rank."""
        comm = reduction.comm
        proof = rounds.proved(reduction, schedule)
        self.certificate = proof.certificate
        #: [records, width].
        self.records = reduction.records(schedule.name)
        self._name, self._operator = schedule.name, reduction.operator
        self._memory: PeerMemory = reduction.memory
        self._seconds = waiting.limit()
        self._comm = duplicate(comm)
        self._near = next(node for node in nodes if comm.rank in node)
        count, group = len(self.records), reduction.group
        self.program = pulls.plan(schedule, proof, comm.rank, count, group, nodes)
        bytes_each = self.records.nbytes // max(count, 1)
        #: As `Reducer.sent`.
        self.sent = [
            (message.dst, message.records * bytes_each)
            for message in traffic.messages(schedule, count, group)
            if message.src == comm.rank
        ]
        self._window = 0  # address; there is none at 0
        self._opened: list[int] = []
        #: What runs a part of the program; None before `connect`, and on a rank alone, which has none.
        self.pull: Pull | None = None

    def expose(self) -> Window:
        """This rank's window. Raises `TransportError`, `BackendError`."""
        operator: PullingOperator = self._operator
        handle = b""
        if len(self._near) > 1:
            self._window, handle = self._memory.expose(operator.window_bytes(self.program))
        return Window(handle, operator.pull_blocks(len(self.records)))

    def connect(self, windows: list[Window]) -> None:
        """Open those of the node among the windows of all ranks. Raises `TransportError`, which names the
        rank, `BackendError`."""
        if self._comm.size == 1:
            return
        addresses = [self._open(rank, window.handle) for rank, window in enumerate(windows)]
        blocks = min(windows[rank].blocks for rank in self._near)
        self.pull = self._operator.planned_pull(
            self.records, self.program, self._comm.rank, addresses, self._seconds, blocks
        )

    def _open(self, rank: int, handle: bytes) -> int:
        if rank == self._comm.rank or rank not in self._near:
            return self._window * (rank == self._comm.rank)
        try:
            address = self._memory.open_exposed(handle)
        except TransportError as error:
            raise TransportError(f"the memory of rank {rank} cannot be opened: {error}") from error
        self._opened.append(address)
        return address

    def late(self) -> TransportError | None:
        """Who was waited for in vain, as far as what was queued is done."""
        late = self.pull and self.pull.late()
        if not late:
            return None
        what = f"{self._name}, round {late[1]}"
        return TransportError(waiting.overdue(what, f"rank {late[0]}", self._seconds))

    def raise_if_late(self) -> None:
        """Raise `TransportError` where somebody was."""
        error = self.late()
        if error:
            raise error

    def close(self) -> None:
        """The end of steps that are done: all close what they opened before any frees what was open.
        Collective. Raises `TransportError` where the others do not come to it."""
        self.pull = None
        while self._opened:
            self._memory.close_exposed(self._opened.pop())
        everyone = self._comm.Ibarrier()
        if not waiting.until(everyone.Test, self._seconds):
            what = f"the end of {self._name}"
            raise TransportError(waiting.overdue(what, "the other ranks", self._seconds))
        if self._window:
            self._memory.withdraw(self._window)
        self._comm.Free()


class Reducer(BaseReducer):
    """A planned reduction of a buffer in the memory of a GPU, in place, over ranks that share a node.

    To be planned as its `windows` are. A step is queued and not waited for. A rank that does not come in time
    leaves NaN in the records of those who wait, and `TransportError` for their next step, `synchronize` or
    `close`.
    """

    executor = "peer"
    queued = True

    def __init__(self, reduction: Reduction, schedule: Schedule) -> None:
        """Raises as `Windows`."""
        self.windows = Windows(reduction, schedule, (tuple(range(reduction.comm.size)),))
        self.certificate, self.sent = self.windows.certificate, self.windows.sent
        self._memory: PeerMemory = reduction.memory
        super().__init__(schedule.name)

    @property
    def blocking(self) -> int:
        """Never: a step is queued, and the kernel minds the time."""
        return 0

    def _check(self) -> None:
        super()._check()
        self.windows.raise_if_late()

    def _begin(self) -> None:
        if self.windows.pull:
            self.windows.pull()

    def _complete(self) -> None:
        """The stream does the rest."""

    def followed_by(self, work: Any) -> Callable[[], None] | None:
        """Where this rank is not alone."""
        launch = self.windows.pull and self.windows.pull.followed_by(work)
        if launch is None:
            return None

        def step() -> None:
            self._check()
            self._running = self._number = self._number + 1
            self._run(launch)
            self._running = 0

        return step

    def synchronize(self) -> None:
        """Wait for the steps in the current stream, which end by themselves. Raises `TransportError` where
        one of them waited in vain."""
        self._memory.synchronize()
        self.windows.raise_if_late()

    def _release(self) -> None:
        self._memory.synchronize_all()
        self.windows.raise_if_late()  # then others may be lost, and what they read stays
        self.windows.close()

    def _abandon(self) -> None:
        """Nothing: others may be reading what this rank exposes, for as long as it lives."""
