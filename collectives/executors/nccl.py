"""Runs one schedule over NCCL: grouped sends and receives for each round, merge kernels between them.

Everything goes to one stream, in order, without the host: the messages of a round are one group (NCCL runs
them at the same time, and needs that: two ranks that each send first would wait for each other for ever).
"""

from __future__ import annotations

from typing import Any

from treeattn.collectives.check import Certificate, prove
from treeattn.collectives.executors import rounds
from treeattn.collectives.executors.captured import CapturedReducer
from treeattn.collectives.libraries.nccl import Communicator
from treeattn.collectives.memory import Stream
from treeattn.collectives.operator import Operator
from treeattn.collectives.schedule import Schedule
from treeattn.errors import ScheduleError

__all__ = ["Reducer"]


class Reducer(CapturedReducer):
    """A planned reduction of `buffer` in place over all ranks of `communicator`, which it then owns.

    buffer, group and results: as for `executors.mpi.Reducer`, but in the memory of a GPU. A call queues one
    step and does not wait; from the second one on it is one launch of a CUDA graph. Collective.

    Raises `ScheduleError` if the schedule is for another number of ranks or is not a correct reduction.
    """

    def __init__(
        self,
        communicator: Communicator,
        schedule: Schedule,
        operator: Operator,
        buffer: Any,
        stream: Stream,
        group: int = 1,
    ) -> None:
        if schedule.size != communicator.size:
            raise ScheduleError(
                f"{schedule.name}: made for {schedule.size} ranks, the communicator has {communicator.size}; "
                f"build it with size={communicator.size}"
            )
        proof = prove(schedule)
        if not buffer.flags.c_contiguous or buffer.dtype != operator.dtype:
            raise ScheduleError(f"{schedule.name}: the buffer must be C-contiguous {operator.dtype}")
        records = buffer.reshape(-1, group * operator.width)
        self.schedule = schedule
        self.certificate: Certificate = proof.certificate
        self._rounds = list(rounds.plan(schedule, proof, communicator.rank, records, operator, stream))
        super().__init__(schedule.name, communicator, stream)

    def __call__(self) -> None:
        """Queue one whole step; a rank alone has none."""
        if self._rounds or self._closed:
            super().__call__()

    def _queue(self) -> None:
        communicator = self._communicator
        for round_ in self._rounds:
            communicator.group_start()
            for array, peer in round_.receives:
                communicator.receive(array, peer)
            for array, peer in round_.sends:
                communicator.send(array, peer)
            communicator.group_end()
            for action in round_.actions:
                action()
