"""Runs one schedule over NCCL: grouped sends and receives for each round, merge kernels between them; or,
over several nodes, NCCL's messages between the parts of a program that peer memory runs within nodes.

Everything goes to one stream, in order, without the host: the messages of a round are one group (NCCL runs
them at the same time, and needs that: two ranks that each send first would wait for each other for ever).
From the second step on it is one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from treeattn.collectives.executors.interpreter import Interpreter
from treeattn.collectives.executors.lowering import Planned, Regions, plan_program
from treeattn.collectives.executors.peer import Windows
from treeattn.collectives.program import ranks
from treeattn.collectives.runtime import nccl
from treeattn.collectives.runtime.cuda_graph import CudaGraphReducer
from treeattn.collectives.runtime.memory import Stream
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
            communicator.exchange(receives, sends)
            for call in calls:
                call()

    return _reducer("nccl", planned, communicator, spec.memory, queue if rounds else None)


def plan_between_nodes(
    windows: Windows, communicator: nccl.NcclCommunicator, stream: Stream
) -> CudaGraphReducer:
    """The reducer of what `windows` plan, which are to be connected before the first step.

    communicator: of the same ranks, and from now on the reducer's, as `windows` are. A rank that does not
    come in time leaves NaN in the records of its node, which then reaches the others; those that waited for
    it have `TransportError` for the next step, `synchronize` or `close`.
    """
    planned = windows.planned

    def queue() -> None:
        step = windows.step
        assert step is not None, "connect() comes first"
        regions = Regions(planned.records, step.landed)
        step()
        for part, instructions in enumerate(planned.program.exchanges, 1):
            communicator.exchange(*regions.messages(instructions))
            step(part)

    ends = {"timeout": windows.timeout, "end": windows.close}
    return _reducer("peer_nccl", planned, communicator, stream, queue, **ends)


def _reducer(
    executor: str,
    planned: Planned,
    communicator: nccl.NcclCommunicator,
    stream: Stream,
    queue: Callable[[], None] | None,
    **ends: Any,
) -> CudaGraphReducer:
    peers = planned.program.message_peers
    waits_for = ranks(peers) if peers else "the other ranks of the node"
    reducer = CudaGraphReducer(
        planned.name, communicator, stream, queue, peers=(f"{planned.name} over NCCL", waits_for), **ends
    )
    reducer.executor, reducer.certificate, reducer.sent = executor, planned.certificate, planned.sent
    return reducer
