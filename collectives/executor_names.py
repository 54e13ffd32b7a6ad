"""What executors are called, wherever one is named: in options, cluster files and results."""

from __future__ import annotations

#: Runners of a schedule, as `Reducer.executor` names them: on the host, and on GPUs.
EXECUTORS = ("slots", "program", "mpi", "nccl", "peer", "peer_nccl")
# Transport from GPUs -> who runs schedules over it.
_OVER = {"nccl": "nccl", "peer": "peer", "cuda-mpi": "mpi", "host": "mpi"}


def executor_over(transport: str, executor: str | None = None) -> str | None:
    """Who runs a schedule over a transport, as ``transport=`` and ``executor=`` take them; None: a cluster's
    own choice for the host."""
    return _OVER.get(transport, executor)
