"""Persistent requests on a private communicator, which must be freed before MPI_Finalize."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from treeattn.collectives.runtime.reducer import duplicate

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm, Prequest


class PersistentRequests:
    """The requests of one reducer (MPI standard, section 3.9), and a duplicate of its communicator."""

    def __init__(self, comm: Intracomm) -> None:
        """Collective. Raises `BackendError` as `duplicate` does."""
        self.comm = duplicate(comm)
        self._requests: list[Prequest] = []

    def receive(self, array: Any, peer: int, tag: int) -> Prequest:
        """Plan a message into `array`."""
        self._requests.append(self.comm.Recv_init(array, peer, tag))
        return self._requests[-1]

    def send(self, array: Any, peer: int, tag: int) -> Prequest:
        """Plan a message out of `array`."""
        self._requests.append(self.comm.Send_init(array, peer, tag))
        return self._requests[-1]

    def add(
        self, tag: int, receives: Iterable[tuple[Any, int]], sends: Iterable[tuple[Any, int]]
    ) -> list[Prequest]:
        """Plan the messages (array, peer) of a round."""
        arriving = [self.receive(array, peer, tag) for array, peer in receives]
        return arriving + [self.send(array, peer, tag) for array, peer in sends]

    def free(self) -> None:
        """Free the requests, none of which may be active; the MPI library may be at its end already."""
        from mpi4py import MPI

        while self._requests and not MPI.Is_finalized():
            self._requests.pop().Free()

    def close(self) -> None:
        """Free everything. Collective."""
        self.free()
        self.comm.free()
