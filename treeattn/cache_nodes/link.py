"""The model process's end of the tree: calls and steps that go down it to the nodes."""

from __future__ import annotations

import os
from typing import Any

from treeattn.cache_nodes.message import Call, NodeMessage, encode
from treeattn.cache_nodes.tree import meet
from treeattn.collectives.runtime import watchdog
from treeattn.collectives.runtime.reducer import Owner
from treeattn.collectives.schedule import Schedule
from treeattn.errors import ANOTHER_PROCESS, StateError
from treeattn.mpi import job, library
from treeattn.mpi.communicators import MpiCommunicator, collectively, exchange


class NodeLink:
    """Sends what the nodes are to do. busy: whether a step is under way, of which they wait for the rest.
    leave: whether nodes are `treeattn cache-node`, which end with the first that they serve."""

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
