"""The messages of a program over torch.distributed: planned once, started and awaited round by round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from treeattn.collectives.program import Program
from treeattn.collectives.runtime.torch_communicator import TorchCommunicator, reason
from treeattn.errors import PeerError

__all__ = ["TorchMessages"]


class TorchMessages:
    """The messages of one reducer, on a channel of its own."""

    def __init__(self, comm: TorchCommunicator, name: str, program: Program) -> None:
        """name: of the schedule. Collective."""
        self._comm, self._name, self._program = comm.dup(), name, program
        self._rounds: dict[int, list[Any]] = {}
        self._counts: Counter[tuple[Any, int]] = Counter()
        self._under_way: list[Any] = []

    def add(self, number: int, receives: Iterable[tuple[Any, int]], sends: Iterable[tuple[Any, int]]) -> None:
        """Plan the messages (array, peer) of a round."""
        given = [(dist.irecv, *one) for one in receives] + [(dist.isend, *one) for one in sends]
        self._rounds[number] = [self._planned(*one) for one in given]

    def _planned(self, call: Any, array: Any, peer: int) -> Any:
        self._counts[call, peer] += 1
        return self._comm.operation(call, array, peer, self._counts[call, peer])

    def start(self, number: int) -> None:
        """Start a round's. Raises `PeerError`, as `wait` does, where a rank is lost."""
        operations = self._rounds[number]
        try:
            self._under_way = dist.batch_isend_irecv(operations) if operations else []
        except RuntimeError as error:
            raise self._lost(number, error) from error

    def wait(self, number: int) -> None:
        """Return when those of the round that was started have come and gone."""
        try:
            for work in self._under_way:
                work.wait()
        except RuntimeError as error:
            raise self._lost(number, error) from error

    def close(self) -> None:
        """The end. Collective."""
        self._comm.free()

    def _lost(self, number: int, error: RuntimeError) -> PeerError:
        peers = self._program.peers(number)
        return PeerError(f"{self._name}, round {number}: the messages with {peers} failed: {reason(error)}")
