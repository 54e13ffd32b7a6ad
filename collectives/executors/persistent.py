"""Persistent requests must be gone before MPI_Finalize, also when nobody closed what owns them."""

from __future__ import annotations

import atexit
import weakref
from typing import Protocol

__all__ = ["free_at_exit"]


class Owner(Protocol):
    """What holds persistent requests."""

    def free_requests(self) -> None:
        """Free those that are idle; doing it twice does nothing more."""


_owners: weakref.WeakSet[Owner] = weakref.WeakSet()


def free_at_exit(owner: Owner) -> None:
    """Free what `owner` still holds when the process ends, if it lives then."""
    _owners.add(owner)


@atexit.register
def _free_all() -> None:
    for owner in list(_owners):
        owner.free_requests()
