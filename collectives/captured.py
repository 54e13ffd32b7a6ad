"""Work on a GPU's stream that is the same in every step: recorded once, then one launch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

from treeattn.collectives.memory import Stream
from treeattn.collectives.nccl import Communicator
from treeattn.collectives.reducer import Reducer, Reduction
from treeattn.errors import TransportError

__all__ = ["Captured", "CapturedReducer"]


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

    @abstractmethod
    def _queue(self) -> None:
        """Queue one step."""

    def _check(self) -> None:
        super()._check()
        self._captured.check()

    def _begin(self) -> None:
        self._captured()

    def _advance(self) -> bool:
        """The stream does the rest."""
        return True

    def _complete(self) -> None:
        """The stream does the rest."""

    def _release(self) -> None:
        self._stream.synchronize()
        self._captured.drop()
        self._communicator.close()

    def _abandon(self) -> None:
        self._captured.drop()
        self._communicator.abort()
