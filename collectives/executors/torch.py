"""Runs one schedule on one process group of torch.distributed, round by round from Python.

Messages are views of the records, and `batch_isend_irecv` starts those of a round. Over gloo it is tested;
over NCCL, on the memory of a GPU, it has never run.
"""

from __future__ import annotations

from treeattn.collectives.executors import interpreter
from treeattn.collectives.executors.torch_messages import TorchMessages
from treeattn.collectives.program import Planned
from treeattn.collectives.runtime.reducer import ReductionSpec


class Reducer(interpreter.Reducer):
    """A planned reduction over all ranks of a process group. A step raises `PeerError`, which names the
    round, where a rank is lost."""

    executor = "torch"

    def _planned_messages(self, spec: ReductionSpec, planned: Planned) -> TorchMessages:
        return TorchMessages(spec.comm, planned.name, planned.program)
