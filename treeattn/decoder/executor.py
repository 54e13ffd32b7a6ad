"""Who runs the rounds of a schedule on the host: one of `treeattn.collectives.executors`, with the same bits.

- ``"slots"``: one C call a step; ranks of a node read each other's records in shared memory.
- ``"program"``: one C call a step, all messages by MPI.
- ``"mpi"``: Python, round by round: the reference, and what serves everywhere.

Unless one is asked for, ranks take the first that all of them can have.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from treeattn import comm as comm_
from treeattn.collectives.reducer import Reducer, Reduction
from treeattn.collectives.schedule import Schedule
from treeattn.errors import RestrictionError, SharingError, TransportError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["EXECUTORS", "known", "plan", "refuse"]

#: The names that ``executor=`` takes, the fastest first.
EXECUTORS = ("slots", "program", "mpi")


def known(executor: object) -> str | None:
    """`executor` if it is a name that there is, or None. Raises `TransportError`."""
    if executor is None or (isinstance(executor, str) and executor in EXECUTORS):
        return executor
    names = ", ".join(map(repr, EXECUTORS))
    raise TransportError(f"executor {executor!r:.60} is unknown: use one of {names}, or None")


def refuse(executor: str | None, what: str) -> None:
    """Raise `TransportError` if an executor was asked for of `what`, which has none to choose."""
    if executor is not None:
        raise TransportError(f"executor={executor!r} is for schedules over MPI: {what}; leave it out")


def plan(executor: str | None, schedule: Schedule, reduction: Reduction) -> Reducer:
    """The reducer of a schedule over MPI, run by the one that was asked for, or by the best. Collective.

    Raises `TransportError`, on every rank alike, where what was asked for cannot be had on some rank.
    """
    from treeattn.collectives.executors import mpi, mpi_abi, program

    if executor == "mpi":
        return mpi.Reducer(reduction, schedule)
    lacking = _first(reduction.comm, program.problem(reduction))
    if lacking is None:
        return _compiled(executor, schedule, reduction)
    _cannot(executor, lacking, "'mpi'")
    if mpi_abi.problem() is not None:  # else it is the records, of which whoever plans them knows
        _warn(reduction.comm, f"Python runs every round, since {lacking}")
    return _instead(mpi.Reducer(reduction, schedule), lacking)


def _compiled(executor: str | None, schedule: Schedule, reduction: Reduction) -> Reducer:
    from treeattn.collectives.executors import program, slots

    nodes, crowded = comm_.neighbours(reduction.comm)
    alone = all(len(node) == 1 for node in nodes)
    if executor == "program" or (executor is None and alone):
        return program.Reducer(reduction, schedule, crowded=crowded)
    try:
        return slots.Reducer(reduction, schedule, nodes=nodes, crowded=crowded)
    except RestrictionError as error:
        lacking = str(error)
        _cannot(executor, lacking, "'program'")
    except SharingError as error:
        lacking = str(error)
        _cannot(executor, lacking, "'program'")
        _warn(reduction.comm, f"ranks of a node send each other messages: no shared memory on {lacking}")
    return _instead(program.Reducer(reduction, schedule, crowded=crowded), lacking)


def _cannot(executor: str | None, lacking: str, other: str) -> None:
    """Raise `TransportError` if what is lacking was asked for."""
    if executor is not None:
        raise TransportError(
            f"executor={executor!r} cannot run here: {lacking}; take executor={other} or None"
        )


def _instead(reducer: Reducer, lacking: str) -> Reducer:
    reducer.fallback = lacking
    return reducer


def _warn(comm: Intracomm, message: str) -> None:
    """Rank 0 speaks for all."""
    if comm.rank == 0:
        warnings.warn(message, RuntimeWarning, stacklevel=2)


def _first(comm: Intracomm, problem: str | None) -> str | None:
    """The problem of the lowest rank that has one. Collective."""
    with comm_.Agreement(comm) as agreed:
        agreed.told = problem
    named = (f"rank {rank}: {text}" for rank, text in enumerate(agreed.everywhere) if text)
    return next(named, None)
