"""Reductions by persistent requests, which must be gone before MPI_Finalize, also when nobody closed them."""

from __future__ import annotations

import atexit
import os
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

    def _release(self) -> None:
        self._abandon()
        self._comm.Free()

    def _abandon(self) -> None:
        if not self._running:  # else messages may be in flight: freeing now would be an error of its own
            while self._requests:
                self._requests.pop().Free()


_living: weakref.WeakSet[PersistentReducer] = weakref.WeakSet()


def _forget() -> None:
    """In a forked process: the requests, and the memory that ranks share, belong to the one before."""
    for reducer in list(_living):
        reducer.disown()
    _living.clear()


os.register_at_fork(after_in_child=_forget)


@atexit.register
def _free_all() -> None:
    from mpi4py import MPI

    for reducer in () if MPI.Is_finalized() else list(_living):
        reducer._abandon()
