"""Runs one schedule on one process group of torch.distributed, round by round from Python.

Messages are views of the records, and `batch_isend_irecv` starts those of a round. Over gloo it is tested;
over NCCL, on the memory of a GPU, it has never run.
"""

from __future__ import annotations

from treeattn.collectives import program
from treeattn.collectives.executors.interpreter import Interpreter
from treeattn.collectives.executors.torch_messages import TorchMessages
from treeattn.collectives.runtime.reducer import Reducer as BaseReducer
from treeattn.collectives.runtime.reducer import ReductionSpec
from treeattn.collectives.schedule import Schedule


class Reducer(BaseReducer):
    """A planned reduction of a buffer in place over all ranks of a process group.

    ``start()`` posts the first round and ``wait()`` does the rest: torch does not tell, without waiting,
    whether a message of gloo has come. Raises `ScheduleError` if the schedule is for another number of ranks
    or is not a correct reduction; a step `PeerError`, which names the round, where a rank is lost.
    """

    executor = "torch"

    def __init__(self, spec: ReductionSpec, schedule: Schedule) -> None:
        planned = program.of_spec(spec, schedule)
        super().__init__(schedule.name)
        self._messages = TorchMessages(spec.comm, schedule.name, planned.program)
        self.certificate, self.sent, self._program = planned.certificate, planned.sent, planned.program
        self._ready = spec.memory.synchronize
        interpreter = Interpreter(spec, planned)
        self._rounds = []
        for number, instructions in planned.program.by_round():
            self._messages.add(number, *interpreter.messages(instructions))
            self._rounds.append((number, interpreter.calls(instructions)))
        self._at: int | None = None
        self.stream_ordered = not self._rounds

    def waits_for(self) -> tuple[str, str]:
        """The round, and its peers."""
        if self._at is None:
            return super().waits_for()
        return f"{self.name}, round {self._at}", self._program.peers(self._at)

    def _post(self, number: int) -> None:
        self._at = number
        self._ready()
        self._messages.start(number)

    def _begin(self) -> None:
        if self._rounds:
            self._post(self._rounds[0][0])

    def _complete(self) -> None:
        for number, calls in self._rounds:
            if number != self._at:
                self._post(number)
            self._messages.wait(number)
            for call in calls:
                call()
        self._at = None

    def _release(self) -> None:
        self._messages.close()

    def _at_exit(self) -> None:
        self._messages.free()
