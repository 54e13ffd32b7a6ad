"""Reductions by persistent requests, which must be gone before MPI_Finalize, also when nobody closed them."""

from __future__ import annotations

import atexit
import weakref
from typing import TYPE_CHECKING

from treeattn.collectives.reducer import Reducer, Reduction, duplicate

if TYPE_CHECKING:
    from mpi4py.MPI import Prequest

__all__ = ["PersistentReducer"]


class PersistentReducer(Reducer):
    """A `Reducer` with a private duplicate of the communicator, and the `_requests` that it planned there."""

    def __init__(self, name: str, reduction: Reduction) -> None:
        super().__init__(name)
        self._comm = duplicate(reduction.comm)
        self._requests: list[Prequest] = []
        _living.add(self)

    def disown(self) -> None:
        """The requests are another process's."""
        super().disown()
        _living.discard(self)

    def _release(self) -> None:
        self._abandon()
        self._comm.Free()

    def _abandon(self) -> None:
        if not self._running:  # else messages may be in flight: freeing now would be an error of its own
            while self._requests:
                self._requests.pop().Free()


_living: weakref.WeakSet[PersistentReducer] = weakref.WeakSet()


@atexit.register
def _free_all() -> None:
    from mpi4py import MPI

    for reducer in () if MPI.Is_finalized() else list(_living):
        reducer._abandon()
