"""The tree of model process and cache nodes: messages go down the edges along which partials come up."""

from __future__ import annotations

import os
import time
from typing import Any

from treeattn.collectives.runtime import watchdog
from treeattn.collectives.schedule import Schedule
from treeattn.decoder.reducers import schedule as planned
from treeattn.errors import RestrictionError
from treeattn.mpi import library
from treeattn.mpi.communicators import MpiCommunicator, collectively
from treeattn.selection import select

_TAG = 1
# A model computes between its layers: a node looks without a pause for so long, and then less and less often.
_EAGER, _PATIENT = 20e-3, 5.0
_NAP, _LONG_NAP = 2e-4, 5e-3


def meet(comm: MpiCommunicator, scheme: str | Schedule | None) -> Tree:
    """The tree of a scheme, `hierarchical` unless given. Collective.

    Raises, the same on every rank, where it is none.
    """
    selection = collectively(comm, lambda: select("hierarchical" if scheme is None else scheme))
    schedule = planned(selection, comm, "root")
    if schedule is None:  # on every rank
        raise RestrictionError(
            f"{selection.text} is no schedule: cache nodes take a tree, such as hierarchical"
        )
    return Tree(comm, schedule, collectively(comm, lambda: _edges(schedule)))


def _edges(schedule: Schedule) -> dict[int, int]:
    """Child -> parent of a schedule to rank 0. Raises `RestrictionError` for one that is no tree."""
    moved = [t for round_ in schedule.rounds for t in round_]
    parents = {t.src: t.dst for t in moved}
    if schedule.chunks > 1 or len(moved) != schedule.size - 1 or set(parents) != set(range(1, schedule.size)):
        raise RestrictionError(
            f"{schedule.name} cuts the records or has more than one way to rank 0: cache nodes take a tree, "
            "such as hierarchical or k_nomial_tree:radix=4"
        )
    return parents


class Tree:
    """This rank's place in the tree. `messages` and `bytes` count what it has sent down."""

    def __init__(self, comm: MpiCommunicator, schedule: Schedule, parents: dict[int, int]) -> None:
        """Collective."""
        self.schedule = schedule
        self.parent = parents.get(comm.rank, 0)
        self.children = sorted(child for child, parent in parents.items() if parent == comm.rank)
        self.messages = self.bytes = 0
        self._own = comm.dup()
        self._comm = self._own.unwatched
        self._library = library.load()
        self._sending: list[Any] = []
        named = ", ".join(map(str, self.children))
        self._reception = watchdog.Guarded("a message to cache nodes", f"reception by rank {named}")
        self._arrival = watchdog.Guarded(
            "a message for cache nodes", f"the message from rank {self.parent}", patient=True
        )

    def down(self, message: bytes | bytearray) -> None:
        """Hand it on to the children."""
        self._sending = [self._comm.Isend(message, child, _TAG) for child in self.children]
        self.messages += len(self.children)
        self.bytes += len(self.children) * len(message)

    def sent(self) -> None:
        """Wait until what was handed on has left."""
        if self._sending:
            with self._reception:
                self._library.Request.Waitall(self._sending)
            self._sending = []

    def receive(self) -> bytearray:
        """The next message of the parent, handed on to the children. It is waited for as long as the model
        process runs."""
        self.sent()
        status, began = self._library.Status(), time.monotonic()
        with self._arrival:
            while (found := self._comm.Improbe(self.parent, _TAG, status)) is None:
                waited = time.monotonic() - began
                if waited < _EAGER:
                    os.sched_yield()
                else:
                    time.sleep(_NAP if waited < _PATIENT else _LONG_NAP)
            message = bytearray(status.Get_count(self._library.BYTE))
            found.Recv(message)
        self.down(message)
        return message

    def close(self) -> None:
        """Collective."""
        self.sent()
        self._own.free()
