"""Runs one schedule over NCCL: grouped sends and receives for each round, merge kernels between them.

Everything goes to one stream, in order, without the host: the messages of a round are one group (NCCL runs
them at the same time, and needs that: two ranks that each send first would wait for each other for ever).
"""

from __future__ import annotations

from treeattn.collectives.captured import CapturedReducer
from treeattn.collectives.executors import rounds
from treeattn.collectives.reducer import Reduction
from treeattn.collectives.schedule import Schedule

__all__ = ["Reducer"]


class Reducer(CapturedReducer):
    """A planned reduction of a buffer in the memory of a GPU, in place, over all ranks of a communicator of
    NCCL, which it then owns.

    Raises `ScheduleError` if the schedule is for another number of ranks or is not a correct reduction.
    """

    executor = "nccl"

    def __init__(self, reduction: Reduction, schedule: Schedule) -> None:
        self.certificate, planned = rounds.plan(reduction, schedule)
        super().__init__(schedule.name, reduction)
        self._rounds = list(planned)
        self._calls = [rounds.calls(reduction, round_.actions) for round_ in self._rounds]
        self._captured.connected = not self._rounds  # a rank alone has nobody to connect to
        self.sent = rounds.sent(self._rounds)

    def waits_for(self) -> tuple[str, str]:
        """Within a graph nobody knows which round it has come to: all peers."""
        messages = [message for round_ in self._rounds for message in (*round_.receives, *round_.sends)]
        peers = sorted({message.peer for message in messages})
        return f"{self.name} over NCCL", f"rank {' and '.join(map(str, peers))}"

    def _begin(self) -> None:
        if self._rounds:  # a rank alone has none
            super()._begin()

    def _queue(self) -> None:
        communicator = self._communicator
        for round_, calls in zip(self._rounds, self._calls, strict=True):
            communicator.group_start()
            for array, peer, _ in round_.receives:
                communicator.receive(array, peer)
            for array, peer, _ in round_.sends:
                communicator.send(array, peer)
            communicator.group_end()
            for call in calls:
                call()
