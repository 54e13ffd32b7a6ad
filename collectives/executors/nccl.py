"""Runs one schedule over NCCL: grouped sends and receives for each round, merge kernels between them.

Everything goes to one stream, in order, without the host: the messages of a round are one group (NCCL runs
them at the same time, and needs that: two ranks that each send first would wait for each other for ever).
"""

from __future__ import annotations

from treeattn.collectives.executors.interpreter import Interpreter
from treeattn.collectives.executors.lowering import plan_program
from treeattn.collectives.program import ranks
from treeattn.collectives.runtime import nccl
from treeattn.collectives.runtime.cuda_graph import CudaGraphReducer
from treeattn.collectives.runtime.reducer import ReductionSpec
from treeattn.collectives.schedule import Schedule


def plan(spec: ReductionSpec, schedule: Schedule) -> CudaGraphReducer:
    """The reducer of a schedule over a buffer in the memory of a GPU, in place, over all ranks of a
    communicator of NCCL, which it then owns.

    Raises `ScheduleError` if the schedule is for another number of ranks or is not a correct reduction.
    """
    planned = plan_program(spec, schedule)
    interpreter = Interpreter(spec, planned)
    communicator: nccl.NcclCommunicator = spec.comm
    rounds = [
        (*interpreter.messages(instructions), interpreter.calls(instructions))
        for _, instructions in planned.program.by_round
    ]

    def queue() -> None:
        for receives, sends, calls in rounds:
            nccl.exchange(communicator, receives, sends)
            for call in calls:
                call()

    peers = planned.program.message_peers
    reducer = CudaGraphReducer(
        schedule.name,
        communicator,
        spec.memory,
        queue if rounds else None,
        peers=(f"{schedule.name} over NCCL", ranks(peers)),
    )
    reducer.executor, reducer.certificate, reducer.sent = "nccl", planned.certificate, planned.sent
    return reducer
