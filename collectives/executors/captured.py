"""Work on a GPU's stream that is the same in every step: recorded once, then one launch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from treeattn.collectives.libraries.nccl import Communicator
from treeattn.collectives.memory import Stream
from treeattn.errors import ScheduleError, TransportError

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
        self._connected = False
        self._launch: Callable[[], object] | None = None

    def __call__(self) -> None:
        """Queue the work once."""
        if self._stream.capturing():
            if not self._connected:
                raise TransportError("NCCL connects ranks in their first step: run one before capturing one")
            self._queue()
        elif not self._connected:
            self._queue()
            self._connected = True
        else:
            if self._launch is None:
                self._launch = self._stream.capture(self._queue)
            self._launch()

    def drop(self) -> None:
        """Give the graph back, before the communicator that it uses."""
        self._launch = None


class CapturedReducer(ABC):
    """What reducers over NCCL have in common: a captured step, and their end.

    It owns `communicator`. A call queues one step and does not wait; from the second one on it is one launch
    of a CUDA graph. Collective. Raises `ScheduleError` for a step after its end.
    """

    def __init__(self, name: str, communicator: Communicator, stream: Stream) -> None:
        self._name, self._communicator, self._stream = name, communicator, stream
        self._step = Captured(stream, self._queue)
        self._closed = False

    @abstractmethod
    def _queue(self) -> None:
        """Queue one step."""

    def __call__(self) -> None:
        """Queue one whole step."""
        if self._closed:
            raise ScheduleError(f"{self._name}: a step on a reducer that is closed")
        self._step()

    def close(self) -> None:
        """After the work that was queued: give graph and communicator back. Collective."""
        if not self._closed:
            self._closed = True
            self._stream.synchronize()
            self._step.drop()
            self._communicator.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exception: object) -> None:
        # Closing is collective: where this rank fails alone, nobody can be waited for.
        if exception[0] is None:
            self.close()
        elif not self._closed:
            self._closed = True
            self._step.drop()
            self._communicator.abort()
