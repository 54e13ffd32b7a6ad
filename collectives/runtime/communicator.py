"""The communicator protocol: what this package asks of MPI's communicators and of other libraries' groups."""

from __future__ import annotations

from typing import Protocol, TypeVar

__all__ = ["Communicator"]

T = TypeVar("T")
C = TypeVar("C", bound="Communicator")


class Communicator(Protocol):
    """A group of ranks whose every blocking call ends the job, with one sentence, at ``TREEATTN_TIMEOUT``."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """Ranks by node (shared memory domain), nodes in order of their lowest rank."""

    def allgather(self, sendobj: T, /) -> list[T]:
        """The objects of all ranks, in order of ranks."""

    def bcast(self, obj: T, /, root: int = 0) -> T:
        """The object of the rank `root`."""

    def barrier(self) -> None:
        """Return when all ranks have called."""

    def dup(self: C) -> C:
        """A communicator of the same ranks whose messages meet no others."""

    def free(self) -> None:
        """Give it back to its library."""
