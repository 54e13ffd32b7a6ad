"""What executors need of the memory that holds the records, and of the stream of work on it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

#: An array of NumPy, or one of a GPU that behaves as NumPy's do.
Array: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[Any]]
#: An array that travels, and the rank that it goes to or comes from.
PeerArray: TypeAlias = tuple[Array, int]


class Requests(NamedTuple):
    """Handles of the requests of a round, side by side."""

    address: int
    number: int


class Memory(Protocol):
    """Where records lie. Work on them may be queued: it runs in order."""

    def empty(self, shape: tuple[int, ...], dtype: Any, /) -> Array:
        """A new C-contiguous array."""

    def copy(self, into: Any, source: Any, /) -> None:
        """Queue a copy between arrays of one shape and type."""

    def synchronize(self) -> None:
        """Wait for what was queued."""


class Stream(Memory, Protocol):
    """Memory of a GPU, whose queued work can be recorded as one CUDA graph. `Memory.synchronize` waits for
    the stream that is current; work may have been queued to another one before."""

    def done(self) -> bool:
        """Whether all that was queued to the current stream is done, without waiting."""

    def synchronize_all(self) -> None:
        """Wait for every stream of the GPU; from any thread."""

    def follow(self, last: Any) -> Any:
        """Make the current stream wait for what was queued to the stream `last` until now; None: for nothing.
        Returns the current one; while it is captured, which shuts others out, `last`, and nothing is done.
        Raises `BackendError` where the last one is gone."""

    def capturing(self) -> bool:
        """Whether what is queued now is recorded instead of run."""

    def capture(self, run: Callable[[], object]) -> Callable[[], object]:
        """Record what `run` queues; the result queues it again, in one launch."""

    def address(self, array: Array) -> int:
        """The address of an array's first byte."""

    @property
    def stream(self) -> int:
        """The stream that work is queued to now, as libraries take it."""


class PeerMemory(Stream, Protocol):
    """Memory of a GPU that other processes of the node can read, where it is allocated for that."""

    def expose(self, size: int) -> tuple[int, bytes]:
        """`size` bytes of zeros at a new address, and the handle that opens them in another process.
        Raises `TransportError` where the GPU cannot, `BackendError` where memory is out."""

    def withdraw(self, address: int) -> None:
        """Free what was exposed, which no other process may have open any more."""

    def open_exposed(self, handle: bytes) -> int:
        """The address here of what another process exposed. Raises `TransportError`."""

    def close_exposed(self, address: int) -> None:
        """The end of what was opened."""


class StreamOrder:
    """Steps that share buffers, in the order in which they are queued, whichever stream is current then."""

    def __init__(self, stream: Stream | None) -> None:
        """stream: None where work is done at once."""
        self._stream = stream
        self._last: Any = None

    def __call__(self) -> None:
        """Check the stream before anything of a step is queued. Raises `BackendError`."""
        if self._stream is not None:
            self._last = self._stream.follow(self._last)


_LARGE_PAGE = 2 << 20
_ADVISED = 4 << 20  # from so many bytes on NumPy advises the system to use large pages


class Host:
    """Memory of this process: NumPy arrays, and nothing is queued."""

    empty: Callable[..., Array] = staticmethod(np.empty)
    copy = staticmethod(np.copyto)

    def large(self, shape: tuple[int, ...], dtype: Any, /) -> Array:
        """As `empty`; one that takes half a large page or more begins with one: it is read up to twice as
        fast."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if size < _LARGE_PAGE // 2:
            return np.empty(shape, dtype)
        room = np.empty(max(size + _LARGE_PAGE, _ADVISED), np.uint8)
        begin = -room.ctypes.data % _LARGE_PAGE
        array: Array = room[begin : begin + size].view(dtype).reshape(shape)
        return array

    def synchronize(self) -> None:
        """Return at once: work on the host is not queued."""


HOST = Host()
