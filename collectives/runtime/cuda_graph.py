"""Work on a GPU's stream that is the same in every step: recorded once, then one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from treeattn.collectives.runtime import watchdog
from treeattn.collectives.runtime.memory import Stream
from treeattn.collectives.runtime.nccl import NcclCommunicator
from treeattn.collectives.runtime.reducer import Reducer
from treeattn.errors import PeerTimeoutError, StateError, TransportError

_ABORT_SECONDS = 10.0  # NCCL's abort waits for graphs as its end does: then it is left behind in its thread


class CudaGraph:
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
        #: What launches it, once it is recorded.
        self.recorded: Callable[[], object] | None = None

    def __call__(self) -> None:
        """Queue the work: kernel by kernel the first time, as one graph launch afterwards."""
        if self._stream.capturing():
            self._queue()
        elif not self.connected:
            self._queue()
            self.connected = True
        else:  # without a name: the traceback of a launch that fails would keep the graph alive
            (self.recorded or self.record())()

    def check(self) -> None:
        """Raise `StateError` where a capture would hold what cannot be captured."""
        if not self.connected and self._stream.capturing():
            raise StateError("NCCL connects ranks in their first step: run one before capturing one")

    def record(self) -> Callable[[], object]:
        """Record the work now, without running it; what launches it."""
        self.recorded = self._stream.capture(self._queue)
        return self.recorded

    def drop(self) -> None:
        """Give the graph back, before the communicator that it uses, and what it works on."""
        self.recorded, self._queue = None, tuple


class StreamReducer(Reducer):
    """A reduction that is queued to a stream and not waited for. ``start()`` queues all of it and ``wait()``
    nothing: the stream keeps the order."""

    stream_ordered = True

    def __init__(self, name: str, timeout: Callable[[], TransportError | None]) -> None:
        """timeout: the error of a wait that the work itself gave up; None where there is none."""
        super().__init__(name)
        self._timeout = timeout

    def _check(self) -> None:
        super()._check()
        self._check_results()

    def _check_results(self) -> None:
        error = self._timeout()
        if error:
            raise error

    def _advance(self) -> bool:
        return True

    def _complete(self) -> None:
        """The stream does the rest."""


class CudaGraphReducer(StreamReducer):
    """A reduction over NCCL that is the same work on a stream in every step: recorded once, then one launch.

    It owns the communicator. From the second step on it is one launch of a CUDA graph. One that is never
    closed keeps its communicator for good.
    """

    def __init__(
        self,
        name: str,
        communicator: NcclCommunicator,
        stream: Stream,
        queue: Callable[[], object] | None,
        *,
        peers: tuple[str, str] | None = None,
        timeout: Callable[[], TransportError | None] = lambda: None,
        end: Callable[[], object] = tuple,
    ) -> None:
        """queue: queues one step; None where a rank is alone. peers: as `waits_for` gives them. end: releases
        what else the work uses. Collective."""
        super().__init__(name, timeout)
        self._communicator, self._stream = communicator, stream
        self._graph = CudaGraph(stream, queue) if queue else None
        self.idle = queue is None
        self._peers = peers or (name, "the other ranks")
        self._end = end
        self._seconds = watchdog.limit()

    def waits_for(self) -> tuple[str, str]:
        """All peers: a graph does not tell which round it has come to."""
        return self._peers

    def _check(self) -> None:
        super()._check()
        if self._graph:
            self._graph.check()

    def _begin(self) -> None:
        if self._graph:
            self._graph()

    def queued(self, work: Any) -> tuple[Any, ...] | None:
        return (self._graph, work) if self._graph else None

    def synchronize(self) -> None:
        """Wait for the steps in the current stream.

        Raises `TransportError` after `watchdog.limit` seconds, or once NCCL says that something broke; the
        reducer is at its end then, its communicator aborted.
        """
        try:
            if not watchdog.poll(self._stream.done, self._seconds, self._communicator.check):
                raise self._overdue()
            self._check_results()
        except BaseException:
            self._running, self._failed = self._number or 1, True  # its memory may still be written to
            self._leave()
            raise

    def _overdue(self) -> TransportError:
        """The error of this wait, or of what holds it up."""
        what, peers = self.waits_for()
        message = watchdog.timeout_message(f"{what}, queued to a GPU", peers, self._seconds)
        return self._timeout() or PeerTimeoutError(message)

    def _release(self) -> None:
        """Every stream is waited for: the last step may be in one that is no longer current."""
        if not watchdog.call_with_timeout(self._seconds, self._stream.synchronize_all):
            _left_behind.append(self)
            self._abandon()
            raise self._overdue()
        try:
            self._check_results()
        except TransportError:
            self._abandon()
            raise
        self._drop_graph()
        if not watchdog.call_with_timeout(self._seconds, self._communicator.close):
            raise PeerTimeoutError(
                f"{self.name}: NCCL's end took more than {self._seconds:g} s: drop CUDA graphs of your own "
                "that hold a step before close(), and close on every rank"
            )
        self._end()

    def _abandon(self) -> None:
        self._drop_graph()
        watchdog.call_with_timeout(_ABORT_SECONDS, self._communicator.abort)

    def _drop_graph(self) -> None:
        if self._graph:
            self._graph.drop()


# Reducers whose end could not be waited for: a GPU may still write to their memory.
_left_behind: list[CudaGraphReducer] = []
