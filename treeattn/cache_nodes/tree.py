"""The tree of model process and cache nodes: messages go down the edges along which partials come up."""

from __future__ import annotations

import os
import time
from typing import Any

from treeattn.cache_nodes.message import Call, NodeMessage, encode
from treeattn.collectives.runtime import watchdog
from treeattn.collectives.runtime.reducer import Owner
from treeattn.collectives.schedule import Schedule
from treeattn.decoder.reducers import schedule as planned
from treeattn.errors import ANOTHER_PROCESS, RestrictionError, StateError
from treeattn.mpi import job, library
from treeattn.mpi.communicators import MpiCommunicator, collectively, exchange
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


class NodeLink:
    """The model process's end of the tree: sends what the nodes are to do. busy: whether a step is under
    way, of which they wait for the rest. leave: whether nodes are `treeattn cache-node`, which end with the
    first that they serve."""

    def __init__(self, comm: MpiCommunicator, scheme: str | Schedule | None) -> None:
        """Collective, as `serve` is."""
        self.comm = comm
        said = exchange(comm, "connect and serve", scheme, job.commanded())
        self.leave = any(commanded for _, commanded in said[1:])
        self.tree = meet(comm, scheme)
        comm.Split(library.load().UNDEFINED)  # the nodes have a communicator of their own
        self._closed = self.busy = False
        self._process = os.getpid()
        self.owner = Owner("the tree of the cache nodes")
        comm.owner.let_go()  # another thread may use the nodes

    @property
    def closed(self) -> bool:
        """After `close`, and in a forked process: the nodes are its parent's, and go on when it ends."""
        return self._closed or self._process != os.getpid()

    def check_open(self) -> None:
        """Raise `StateError` where they are `closed`, and in a second thread: steps come in one order."""
        self.owner.take()
        if self.closed:
            known = "have ended: they are closed" if self._closed else f"are {ANOTHER_PROCESS}"
            raise StateError(f"the cache nodes {known}")

    def call(self, name: str, **arguments: Any) -> None:
        """Have the nodes do what is called so."""
        self.check_open()
        self.send(Call(name, arguments))

    def send(self, message: NodeMessage) -> None:
        """Down the tree. Raises `ArgumentError` for what no message can have, before anything is sent."""
        encoded = encode(message)
        self.tree.sent()
        self.tree.down(encoded)

    def done(self) -> None:
        """Wait until the nodes have done what was called. Raises what they raised."""
        with watchdog.Activity("what the cache nodes do"):
            collectively(self.comm, tuple)

    def close(self) -> None:
        """End the nodes, and the wait of each in `serve`. Collective."""
        self.call("close")
        self._closed = True
