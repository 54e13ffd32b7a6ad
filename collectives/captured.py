"""Work on a GPU's stream that is the same in every step: recorded once, then one launch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

from treeattn.collectives import waiting
from treeattn.collectives.memory import Stream
from treeattn.collectives.nccl import Communicator
from treeattn.collectives.reducer import Reducer, Reduction
from treeattn.errors import TransportError

__all__ = ["Captured", "CapturedReducer"]

_ABORT_SECONDS = 10.0  # NCCL's abort waits for graphs as its end does: then it is left behind in its thread


class Captured:
    """`queue`, called as it is the first time and launched as one CUDA graph from the second time on.

    NCCL connects ranks when the first messages between them are queued, which a capture cannot hold. Whether
    a call is captured must be the same on all ranks that take part in it (NCCL user guide, "Using NCCL with
    CUDA Graphs"): it depends on nothing but the number of calls. Within a capture of the caller's own it is
    queued into that one.
    """

    def __init__(self, stream: Stream, queue: Callable[[], object]) -> None:
        self._stream = stream
        self._queue = queue
        self.connected = False
        self._launch: Callable[[], object] | None = None

    def __call__(self) -> None:
        """Queue the work once."""
        if self._stream.capturing():
            self._queue()
        elif not self.connected:
            self._queue()
            self.connected = True
        else:  # without a name: the traceback of a launch that fails would keep the graph alive
            (self._launch or self.record())()

    def check(self) -> None:
        """Raise `TransportError` where a capture would hold what cannot be captured."""
        if not self.connected and self._stream.capturing():
            raise TransportError("NCCL connects ranks in their first step: run one before capturing one")

    def record(self) -> Callable[[], object]:
        """Record the work now, without running it; what launches it."""
        self._launch = self._stream.capture(self._queue)
        return self._launch

    def drop(self) -> None:
        """Give the graph back, before the communicator that it uses, and what it works on."""
        self._launch, self._queue = None, tuple


class CapturedReducer(Reducer):
    """What reducers over NCCL have in common: a captured step, and their end.

    It owns the communicator. A step is queued and not waited for; from the second one on it is one launch of
    a CUDA graph. ``start()`` queues all of it and ``wait()`` nothing: the stream keeps the order. One that
    nobody closes keeps its communicator for good.
    """

    queued = True

    def __init__(self, name: str, reduction: Reduction) -> None:
        super().__init__(name)
        self._communicator: Communicator = reduction.comm
        self._stream: Stream = reduction.memory
        self._captured = Captured(self._stream, self._queue)
        self._seconds = waiting.limit()

    @abstractmethod
    def _queue(self) -> None:
        """Queue one step."""

    def _check_results(self) -> None:
        """Raise `TransportError` where a step that is done has no result, and the reducer knows it."""

    def _check(self) -> None:
        super()._check()
        self._check_results()
        self._captured.check()

    def _begin(self) -> None:
        self._captured()

    def _advance(self) -> bool:
        """The stream does the rest."""
        return True

    def _complete(self) -> None:
        """The stream does the rest."""

    def synchronize(self) -> None:
        """Wait for the steps in the current stream.

        Raises `TransportError` after `waiting.limit` seconds, or once NCCL says that something broke; the
        reducer is at its end then, its communicator aborted.
        """
        try:
            if not waiting.until(self._stream.done, self._seconds, self._communicator.check):
                raise self._overdue()
            self._check_results()
        except BaseException:
            self._running, self._failed = self._number or 1, True  # its memory may still be written to
            self._leave()
            raise

    def _overdue(self) -> TransportError:
        what, peers = self.waits_for()
        return TransportError(waiting.overdue(f"{what}, queued to a GPU", peers, self._seconds))

    def _release(self) -> None:
        """Every stream is waited for: the last step may be in one that is no longer current."""
        if not waiting.within(self._seconds, self._stream.synchronize_all):
            _left_behind.append(self)
            self._abandon()
            raise self._overdue()
        try:
            self._check_results()
        except TransportError:
            self._abandon()
            raise
        self._captured.drop()
        if not waiting.within(self._seconds, self._communicator.close):
            raise TransportError(
                f"{self.name}: NCCL's end took more than {self._seconds:g} s: drop CUDA graphs of your own "
                "that hold a step before close(), and close on every rank"
            )

    def _abandon(self) -> None:
        self._captured.drop()
        waiting.within(_ABORT_SECONDS, self._communicator.abort)


# Reducers whose end could not be waited for: a GPU may still write to their memory.
_left_behind: list[CapturedReducer] = []
