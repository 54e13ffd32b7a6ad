"""What reducers over an MPI library's own collectives have in common: the communicator and a request."""

from __future__ import annotations

from abc import abstractmethod

from mpi4py import MPI

from treeattn.collectives.runtime.mpi_communicator import duplicate
from treeattn.collectives.runtime.reducer import Reducer, ReductionSpec


class CollectiveReducer(Reducer):
    """A `Reducer` whose step begins with one collective and goes on when that has come.

    It runs on a private duplicate of the communicator. Raises `ScheduleError` for a buffer that does not fit.
    """

    def __init__(self, name: str, reduction: ReductionSpec) -> None:
        super().__init__(name)
        self._records = reduction.records(name)
        self._private = duplicate(reduction.comm)
        self._comm = self._private.unwatched  # a step counts itself

    @abstractmethod
    def _first(self) -> MPI.Request:
        """Start the first collective, without waiting for it."""

    @abstractmethod
    def _rest(self) -> None:
        """Make what follows the first collective."""

    #: Whether `_rest` sends nothing, so that it cannot wait.
    one_collective = False

    def _begin(self) -> None:
        self._request = self._first()

    def _advance(self) -> bool:
        return bool(self._request.Test()) and self.one_collective

    def _complete(self) -> None:
        self._request.Wait()
        self._rest()

    def _release(self) -> None:
        self._private.free()
