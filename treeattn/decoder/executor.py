"""Who runs the rounds of a schedule on the host: one of `treeattn.collectives.executors`, with the same bits.

- ``"slots"``: one C call a step; ranks of a node read each other's records in shared memory.
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
    from treeattn.collectives.runtime.communicator import Communicator

__all__ = ["plan", "refuse"]

# Library -> executors whose messages are another's.
_SENDING = {"mpi": ("torch",), "torch": ("mpi", "program")}


def refuse(executor: str | None, what: str) -> None:
    """Raise `TransportError` if an executor was asked for of `what`, which has none to choose."""
    if executor is not None:
        raise TransportError(f"executor={executor!r} is for schedules from the host: {what}; leave it out")


def plan(executor: str | None, schedule: Schedule, reduction: ReductionSpec) -> Reducer:
    """The reducer of a schedule, run by the one that was asked for, or by the best. Collective.

    Raises `TransportError`, on every rank alike, where what was asked for cannot be had on some rank.
    """
    library = communicators.intracomm(reduction.comm).library
    if executor in _SENDING.get(library, ()):
        raise TransportError(
            f"executor={executor!r} sends messages that these ranks cannot: theirs are those of {library}; "
            f"take executor={library!r} or None"
        )
    if library == "torch":
        from treeattn.collectives.executors import torch

        return torch.Reducer(reduction, schedule)
    from treeattn.collectives.executors import compiled, mpi
    from treeattn.collectives.runtime import mpi_abi

    if executor == "mpi":
        return mpi.Reducer(reduction, schedule)
    lacking = _first(reduction.comm, compiled.problem(reduction))
    if lacking is None:
        return _compiled(executor, schedule, reduction)
    _cannot(executor, lacking, "'mpi'")
    if mpi_abi.problem() is not None:  # else it is the records, of which whoever plans them knows
        _warn(reduction.comm, f"Python runs every round, since {lacking}")
    return _instead(mpi.Reducer(reduction, schedule), lacking)


def _compiled(executor: str | None, schedule: Schedule, reduction: ReductionSpec) -> Reducer:
    from treeattn.collectives.executors import compiled, slots

    nodes = communicators.node_groups(reduction.comm)
    oversubscribed = communicators.oversubscribed(reduction.comm)
    alone = all(len(node) == 1 for node in nodes)
    if executor == "program" or (executor is None and alone):
        return compiled.plan(reduction, schedule, oversubscribed=oversubscribed)
    try:
        return slots.plan(reduction, schedule, nodes=nodes, oversubscribed=oversubscribed)
    except SharingError as error:
        lacking = str(error)
        _cannot(executor, lacking, "'program'")
        _warn(reduction.comm, f"ranks of a node send each other messages: no shared memory on {lacking}")
    return _instead(compiled.plan(reduction, schedule, oversubscribed=oversubscribed), lacking)


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
