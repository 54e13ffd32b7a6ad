"""Runs one schedule over several nodes: by peer memory within a node, by NCCL between nodes.

A step is a sequence of launches in one stream: parts of the program, and between two of them a group of
NCCL's messages, which land in memory of their own and fold from there. From the second step on it is one CUDA
graph.
"""

from __future__ import annotations

from treeattn.collectives import program
from treeattn.collectives.executors.lowering import Regions
from treeattn.collectives.executors.peer import Windows
from treeattn.collectives.runtime import nccl
from treeattn.collectives.runtime.cuda_graph import CudaGraphReducer
from treeattn.collectives.runtime.memory import Stream


def plan(windows: Windows, communicator: nccl.NcclCommunicator, stream: Stream) -> CudaGraphReducer:
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
        for part, (sends, receives) in enumerate(planned.program.exchanges, 1):
            nccl.exchange(communicator, *regions.messages([*sends, *receives]))
            step(part)

    peers = planned.program.message_peers
    if peers:
        waits_for = f"{planned.name} over NCCL", program.ranks(peers)
    else:
        waits_for = f"{planned.name} by peer memory", "the other ranks of the node"
    reducer = CudaGraphReducer(
        planned.name,
        communicator,
        stream,
        queue,
        peers=waits_for,
        timeout=windows.timeout,
        end=windows.close,
    )
    reducer.executor, reducer.certificate, reducer.sent = "peer_nccl", planned.certificate, planned.sent
    return reducer
