"""What reducers over an MPI library's own collectives have in common: a step's order, and their end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from mpi4py import MPI

from treeattn.collectives.operator import Operator
from treeattn.errors import ScheduleError

__all__ = ["CollectiveReducer"]


class CollectiveReducer(ABC):
    """A reducer (see `collectives.executors.mpi.Reducer`) of `buffer` in place, in collective calls.

    buffer: C-contiguous, views as [records, operator.width] of operator.dtype. A call blocks in the library;
    ``start()`` begins the first collective without blocking and ``wait()`` does the rest. It runs on a
    private duplicate of `comm`; creating, closing and a step are collective.

    Raises `ScheduleError` for a buffer that does not fit, and for steps out of order.
    """

    def __init__(self, comm: MPI.Intracomm, operator: Operator, buffer: Any) -> None:
        if not buffer.flags.c_contiguous or buffer.dtype != operator.dtype:
            raise ScheduleError(f"{self.name}: the buffer must be C-contiguous {operator.dtype}")
        self._records = buffer.reshape(-1, operator.width)
        self._comm = comm.Dup()
        self._request: MPI.Request | None = None
        self._closed = False

    name: str
    """The scheme."""

    @abstractmethod
    def _step(self) -> None:
        """A whole step, blocking."""

    @abstractmethod
    def _begin(self) -> MPI.Request:
        """The first collective, not blocking."""

    @abstractmethod
    def _complete(self) -> None:
        """What follows the first collective."""

    def __call__(self) -> None:
        """One whole step."""
        self._check_idle()
        self._step()

    def start(self) -> None:
        """Begin a step."""
        self._check_idle()
        self._request = self._begin()

    def wait(self) -> None:
        """Finish the step that `start` began."""
        if self._request is None:
            raise ScheduleError(f"{self.name}: wait() without start()")
        self._request.Wait()
        self._request = None
        self._complete()

    def _check_idle(self) -> None:
        if self._closed or self._request is not None:
            raise ScheduleError(f"{self.name}: a step on a reducer that is closed or already running")

    def close(self) -> None:
        """Free the communicator, after a step in flight. Collective; a second call does nothing."""
        if self._closed:
            return
        if self._request is not None:
            self.wait()
        self._comm.Free()
        self._closed = True

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exception: object) -> None:
        # Freeing a communicator is collective: a rank that fails alone must not wait for the others.
        if exception[0] is None:
            self.close()
        self._closed = True
