"""Runs one schedule over several nodes: by peer memory within a node, by NCCL between nodes.

A step is a sequence of launches in one stream: parts of the program of `collectives.pulls`, and between two
of them a group of NCCL's messages, which land beside the records and fold from there. From the second step on
it is one CUDA graph.
"""

from __future__ import annotations

from typing import Any

from treeattn.collectives.captured import CapturedReducer
from treeattn.collectives.executors.peer import Windows
from treeattn.collectives.nccl import Communicator
from treeattn.collectives.pulls import Exchange, Nodes
from treeattn.collectives.reducer import Reduction
from treeattn.collectives.schedule import Schedule
from treeattn.errors import TransportError

__all__ = ["Reducer"]


class Reducer(CapturedReducer):
    """A planned reduction of a buffer in the memory of a GPU, in place, over ranks of several nodes.

    To be planned as its `windows` are. A rank that does not come in time leaves NaN in the records of its
    node, which then reaches the others; who waited for it has `TransportError` for the next step,
    `synchronize` or `close`.
    """

    executor = "peer_nccl"

    def __init__(
        self, reduction: Reduction, communicator: Communicator, schedule: Schedule, nodes: Nodes
    ) -> None:
        """communicator: of the same ranks as `reduction.comm`, and from now on the reducer's. nodes: as
        `Windows` takes them. Raises as `Windows`."""
        self.windows = Windows(reduction, schedule, nodes)
        self.certificate, self.sent = self.windows.certificate, self.windows.sent
        super().__init__(schedule.name, reduction._replace(comm=communicator))

    def waits_for(self) -> tuple[str, str]:
        """Within a graph nobody knows which round it has come to: all peers in other nodes."""
        exchanges = self.windows.program.exchanges
        messages = [message for exchange in exchanges for message in (*exchange.receives, *exchange.sends)]
        peers = sorted({message.peer for message in messages})
        if not peers:
            return f"{self.name} by peer memory", "the other ranks of the node"
        return f"{self.name} over NCCL", f"rank {' and '.join(map(str, peers))}"

    def _queue(self) -> None:
        pull = self.windows.pull
        assert pull is not None, "connect() comes first"
        pull()
        for part, exchange in enumerate(self.windows.program.exchanges, 1):
            self._exchange(exchange, pull.landed)
            pull(part)

    def _exchange(self, exchange: Exchange, landed: Any) -> None:
        communicator, records = self._communicator, self.windows.records
        communicator.group_start()
        for peer, first, stop in exchange.receives:
            communicator.receive(landed[first:stop], peer)
        for peer, first, stop in exchange.sends:
            communicator.send(records[first:stop], peer)
        communicator.group_end()

    def _check_results(self) -> None:
        self.windows.raise_if_late()

    def _overdue(self) -> TransportError:
        """Who is late within the node holds up the other nodes."""
        return self.windows.late() or super()._overdue()

    def _release(self) -> None:
        super()._release()
        self.windows.close()
