"""Who runs the rounds of a schedule on the host: one of `treeattn.collectives.executors`, with the same bits.

- ``"slots"``: one C call a step; ranks of a node read each other's records in shared memory, and those of
  different nodes send them by MPI or torch.distributed, whichever has started them.
- ``"program"``: one C call a step, all messages by MPI.
- ``"mpi"``: Python, round by round: the reference, and what serves everywhere.
- ``"torch"``: the same by messages of torch.distributed, where the ranks are a process group's.

Unless one is asked for, ranks take the first that all of them can have.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from treeattn import communicators
from treeattn.agreement import Agreement
from treeattn.collectives.runtime.reducer import Reducer, ReductionSpec
from treeattn.collectives.schedule import Schedule
from treeattn.errors import SharingError, TransportError

if TYPE_CHECKING:
    from treeattn.collectives.executors.torch_messages import TorchMessages
    from treeattn.collectives.runtime.communicator import Communicator

__all__ = ["plan", "refuse"]

# Library -> executors that send by another.
_OTHERS = {"mpi": ("torch",), "torch": ("mpi", "program")}


def refuse(executor: str | None, what: str) -> None:
    """Raise `TransportError` if an executor was asked for of `what`, which has none to choose."""
    if executor is not None:
        raise TransportError(f"executor={executor!r} is for schedules from the host: {what}; leave it out")


def plan(executor: str | None, schedule: Schedule, reduction: ReductionSpec) -> Reducer:
    """The reducer of a schedule, run by the one that was asked for, or by the best. Collective.

    Raises `TransportError`, on every rank alike, where what was asked for cannot be had on some rank.
    """
    library = communicators.intracomm(reduction.comm).library
    if executor in _OTHERS[library]:
        raise TransportError(
            f"executor={executor!r} sends messages of another library than {library}, whose ranks these are: "
            f"take executor={library!r} or None"
        )
    if executor == library:
        return _in_python(library, schedule, reduction)
    lacking = _first(reduction.comm, _not_compiled(library, reduction))
    if lacking is None:
        return _compiled(executor, library, schedule, reduction)
    _cannot(executor, lacking, repr(library))
    if library == "mpi" and _not_callable() is not None:  # else it is the records: their planner knows
        _warn(reduction.comm, f"Python runs every round, since {lacking}")
    return _instead(_in_python(library, schedule, reduction), lacking)


def _in_python(library: str, schedule: Schedule, reduction: ReductionSpec) -> Reducer:
    """Round by round."""
    if library == "torch":
        from treeattn.collectives.executors import torch

        return torch.Reducer(reduction, schedule)
    from treeattn.collectives.executors import mpi

    return mpi.Reducer(reduction, schedule)


def _not_compiled(library: str, reduction: ReductionSpec) -> str | None:
    """Why no step of this reduction can be a C call on this rank."""
    from treeattn.collectives.executors import compiled

    return compiled.problem(reduction) or (_not_callable() if library == "mpi" else None)


def _not_callable() -> str | None:
    from treeattn.collectives.runtime import mpi_abi

    return mpi_abi.problem()


def _compiled(executor: str | None, library: str, schedule: Schedule, reduction: ReductionSpec) -> Reducer:
    from treeattn.collectives.executors import compiled, slots

    nodes = communicators.node_groups(reduction.comm)
    oversubscribed = communicators.oversubscribed(reduction.comm)

    def by_messages() -> Reducer:
        if library == "mpi":
            return compiled.plan(reduction, schedule, oversubscribed=oversubscribed)
        return _in_python(library, schedule, reduction)

    alone = all(len(node) == 1 for node in nodes)
    if executor == "program" or (executor is None and alone):
        return by_messages()
    between = _messages_of_torch() if library == "torch" else None
    try:
        return slots.plan(reduction, schedule, nodes=nodes, oversubscribed=oversubscribed, messages=between)
    except SharingError as error:
        lacking = str(error)
        _cannot(executor, lacking, "'program'" if library == "mpi" else "'torch'")
        _warn(reduction.comm, f"ranks of a node send each other messages: no shared memory on {lacking}")
    return _instead(by_messages(), lacking)


def _messages_of_torch() -> type[TorchMessages]:
    from treeattn.collectives.executors.torch_messages import TorchMessages

    return TorchMessages


def _cannot(executor: str | None, lacking: str, other: str) -> None:
    """Raise `TransportError` if what is lacking was asked for."""
    if executor is not None:
        raise TransportError(
            f"executor={executor!r} cannot run here: {lacking}; take executor={other} or None"
        )


def _instead(reducer: Reducer, lacking: str) -> Reducer:
    reducer.fallback = lacking
    return reducer


def _warn(comm: Communicator, message: str) -> None:
    """Rank 0 speaks for all."""
    if comm.rank == 0:
        warnings.warn(message, RuntimeWarning, stacklevel=2)


def _first(comm: Communicator, problem: str | None) -> str | None:
    """The problem of the lowest rank that has one. Collective."""
    with Agreement(comm) as agreed:
        agreed.share = problem
    named = (f"rank {rank}: {text}" for rank, text in enumerate(agreed.gathered) if text)
    return next(named, None)
