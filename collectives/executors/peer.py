"""Runs one schedule within a node whose GPUs read each other's memory: a step is one kernel.

Every rank exposes a window of its memory and opens those of the others (CUDA IPC); the kernel reads the
program of `collectives.program`: what is copied into slots there, published, awaited and gotten.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from treeattn.collectives.executors.lowering import plan_program
from treeattn.collectives.runtime import watchdog
from treeattn.collectives.runtime.communicator import Communicator
from treeattn.collectives.runtime.cuda_graph import StreamReducer
from treeattn.collectives.runtime.memory import PeerMemory
from treeattn.collectives.runtime.operator import OneSidedOperator, OneSidedStep
from treeattn.collectives.runtime.reducer import ReductionSpec
from treeattn.collectives.schedule import Schedule
from treeattn.errors import PeerTimeoutError, TransportError


class Window(NamedTuple):
    """What a rank tells the others: the handle that opens its memory, and its `resident_blocks`."""

    handle: bytes
    blocks: int


class Windows:
    """The windows of a node's ranks, and what this one does with them in a step.

    It is planned in three parts: creating it is collective; `expose` and `connect` are each rank's own and
    may fail on one alone: agree on both. A rank that does not come in time leaves NaN in the records of those
    who wait, in all later steps too.

    Raises `ScheduleError` if the schedule is for another number of ranks or is not a correct reduction.
    """

    def __init__(self, spec: ReductionSpec, schedule: Schedule, nodes: tuple[tuple[int, ...], ...]) -> None:
        """nodes: ranks whose GPUs read one another's memory, the same on every rank."""
        self._node = next(node for node in nodes if spec.comm.rank in node)
        self.planned = plan_program(spec, schedule, self._node)
        self._operator: OneSidedOperator = spec.operator
        self._memory: PeerMemory = spec.memory
        self._seconds = watchdog.limit()
        with watchdog.Activity("planning a reduction"):
            self._comm: Communicator = spec.comm.dup()
        self._window = 0  # address; there is none at 0
        self._opened: list[int] = []
        #: What runs a part of the program; None before `connect`, and on a rank alone, which has none.
        self.step: OneSidedStep | None = None

    def expose(self) -> Window:
        """Allocate this rank's window. Raises `TransportError`, `BackendError`."""
        handle = b""
        if len(self._node) > 1:
            size = self._operator.window_bytes(self.planned.program)
            self._window, handle = self._memory.expose(size)
        return Window(handle, self._operator.resident_blocks(len(self.planned.records)))

    def connect(self, windows: list[Window]) -> None:
        """Open those of the node among the windows of all ranks. Raises `TransportError`, which names the
        rank, `BackendError`."""
        if self._comm.size == 1:
            return
        addresses = [self._open(rank, window.handle) for rank, window in enumerate(windows)]
        blocks = min(windows[rank].blocks for rank in self._node)
        records, program = self.planned.records, self.planned.program
        self.step = self._operator.planned_gets(records, program, addresses, self._seconds, blocks)

    def _open(self, rank: int, handle: bytes) -> int:
        if rank == self._comm.rank or rank not in self._node:
            return self._window * (rank == self._comm.rank)
        try:
            address = self._memory.open_exposed(handle)
        except TransportError as error:
            raise TransportError(f"the memory of rank {rank} cannot be opened: {error}") from error
        self._opened.append(address)
        return address

    def timeout(self) -> TransportError | None:
        """The error of a wait of what was queued and is done; None where there is none."""
        late = self.step and self.step.timed_out_peer()
        if not late:
            return None
        what = f"{self.planned.name}, round {late[1]}"
        return PeerTimeoutError(watchdog.timeout_message(what, f"rank {late[0]}", self._seconds))

    def close(self) -> None:
        """Close after steps that are done: all close what they opened before any frees what was open.
        Collective. Raises `TransportError` where the others do not come to it."""
        self.step = None
        while self._opened:
            self._memory.close_exposed(self._opened.pop())
        if not watchdog.poll(self._comm.start_barrier(), self._seconds):
            what = f"the end of {self.planned.name}"
            raise PeerTimeoutError(watchdog.timeout_message(what, "the other ranks", self._seconds))
        if self._window:
            self._memory.withdraw(self._window)
        self._comm.free()


class PeerReducer(StreamReducer):
    """A planned reduction of a buffer in the memory of a GPU, in place, over ranks that share a node.

    A rank that does not come in time leaves NaN in the records of those who wait, and `TransportError` for
    their next step, `synchronize` or `close`.
    """

    executor = "peer"

    def __init__(self, windows: Windows, memory: PeerMemory) -> None:
        """windows: of one node, to be connected before the first step; the reducer closes them."""
        super().__init__(windows.planned.name, windows.timeout)
        self.certificate, self.sent = windows.planned.certificate, windows.planned.sent
        self._windows, self._memory = windows, memory
        self.idle = not windows.planned.program.by_round

    @property
    def blocking(self) -> int:
        """Always 0: a step is queued, and the kernel minds the time."""
        return 0

    def _begin(self) -> None:
        if self._windows.step:
            self._windows.step()

    def queued(self, work: Any) -> tuple[Any, ...] | None:
        launch = self._windows.step and self._windows.step.fuse_epilogue(work)
        return (launch,) if launch else None

    def synchronize(self) -> None:
        """Wait for the steps in the current stream, which end by themselves. Raises `TransportError` where
        a rank did not come in time."""
        self._memory.synchronize()
        self._check_results()

    def _release(self) -> None:
        self._memory.synchronize_all()
        self._check_results()  # then others may be lost, and what they read stays
        self._windows.close()

    def _abandon(self) -> None:
        """Leave the window: others may be reading what this rank exposes, for as long as it lives."""
