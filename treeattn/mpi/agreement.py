"""Collective agreement at planning: every rank goes on, or every rank raises the same error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from treeattn.collectives.runtime import watchdog
from treeattn.collectives.runtime.communicator import Communicator
from treeattn.errors import ArgumentError, StateError, TreeattnError

T = TypeVar("T")
#: The wait of ranks for one another.
DURING = "what all ranks plan together"


class Agreement:
    """``with Agreement(comm, "load") as agreed:`` around each rank's work: it succeeds on all or on none.
    Collective.

    call: which call of this package this is; where ranks are at different ones, each raises which one another
    rank is at. What the block raises on one rank, every rank raises. What it leaves in `must_match` (by the
    name that an error gives it) must be equal on all ranks. What it leaves in `share` is afterwards in
    `gathered`, by rank.
    """

    def __init__(self, comm: Communicator, call: str = "", during: str = DURING) -> None:
        self._comm, self._call, self._during = comm, call, during
        self.must_match: Mapping[str, object] = {}
        self.share: Any = None
        self.gathered: list[Any] = []

    def __enter__(self) -> Agreement:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, Exception):
            return  # such as Ctrl-C: it ends this process, and so the job
        problem, cause = None if error is None else portable(error), error
        mine = {} if error else self.must_match
        views = exchange(self._comm, self._call, mine, problem, self.share, during=self._during)
        for rank, (_, problem, _) in enumerate(views):
            if problem is not None:
                where = "" if self._comm.size == 1 else f"rank {rank}: "
                raise type(problem)(f"{where}{problem}") from (cause if rank == self._comm.rank else None)
        for name in mine:
            values = [values.get(name) for values, _, _ in views]
            different = [rank for rank, value in enumerate(values) if value != values[0]]
            if different:
                other = f"{values[different[0]]!r} on rank {different[0]}"
                raise ArgumentError(
                    f"{name} differs between ranks: {values[0]!r} on rank 0, {other}; every rank must pass "
                    "the same"
                )
        self.gathered = [shared for _, _, shared in views]


def exchange(comm: Communicator, call: str, *mine: Any, during: str = DURING) -> list[tuple[Any, ...]]:
    """What every rank says at this point of a call, by rank. Collective.

    during: the wait for it, as an error names it. Raises `StateError` where a rank is at another call.
    """
    with watchdog.Activity(during):
        said = comm.allgather((call, *mine))
    for rank, other in enumerate(one[0] if isinstance(one, tuple) else None for one in said):
        if other != call:
            raise StateError(
                f"rank {rank} is at another call{f': {other}' if other else ''}; this is rank {comm.rank}"
                f"{call and ', at '}{call}: all ranks make the same calls in the same order"
            )
    return [one[1:] for one in said]


def portable(error: Exception) -> TreeattnError:
    """An error of this rank as the others raise it."""
    if isinstance(error, TreeattnError):
        return error
    named = isinstance(error, TypeError | ValueError | OverflowError)  # what arguments bring about
    return (ArgumentError if named else TreeattnError)(f"{type(error).__name__}: {error}")


def must_match(comm: Communicator, mine: Mapping[str, object]) -> None:
    """Collective: return only if all ranks brought equal values; otherwise every rank raises the same, so
    that none is left waiting in a later call."""
    with Agreement(comm) as agreed:
        agreed.must_match = mine


def collectively(comm: Communicator, make: Callable[[], T], call: str = "") -> T:
    """Collective: what `make` makes on this rank; where it fails on one, every rank raises the same. call: as
    of an `Agreement`."""
    with Agreement(comm, call):
        return make()


def broadcast_from_root(comm: Communicator, decide: Callable[[], T], what: str) -> T:
    """Collective: what rank 0 decides, on every rank; where it fails, every rank raises the same.

    what: names this wait in the error of a late rank.
    """
    with Agreement(comm, what, what) as agreed:
        if comm.rank == 0:
            agreed.share = decide()
    made: T = agreed.gathered[0]
    return made
