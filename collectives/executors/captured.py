"""Work on a GPU's stream that is the same in every step: recorded once, then one launch."""

from __future__ import annotations

from collections.abc import Callable

from treeattn.collectives.memory import Stream
from treeattn.errors import TransportError

__all__ = ["Captured"]


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
