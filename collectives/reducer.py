"""What a reduction over ranks is to its caller, whoever does the work: schedules, libraries, baselines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from treeattn.collectives.check import Certificate
from treeattn.collectives.memory import HOST
from treeattn.errors import ScheduleError, TransportError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["PlannedReducer", "Reducer", "Reduction", "Sent", "communicators_left", "duplicate"]


class Sent(NamedTuple):
    """The payload that one rank hands to a library's collectives in one step.

    messages is None: how often the bytes travel, and where to, is the library's business.
    """

    messages: None
    bytes: int


class Reducer(Protocol):
    """Folds the records of all ranks, in place, once a step. Planning, a step and closing are collective.

    ``start()`` begins a step and returns, so that other work can overlap; ``wait()`` ends it; a call is both.
    Over a GPU's stream a step is queued and not waited for. Nothing is allocated in a step.
    """

    @property
    def certificate(self) -> Certificate | None:
        """What is proved of the schedule; None where nothing is, because a library decides."""

    @property
    def sent(self) -> list[tuple[int, int]] | Sent | None:
        """What this rank hands over in a step: (destination, bytes) of every message, or the payload of a
        library's collectives; None where only the library knows."""

    def start(self) -> None:
        """Begin a step. Raises `ScheduleError` if one is running, or after the end."""

    def wait(self) -> None:
        """Finish the step that `start` began. Raises `ScheduleError` if there is none."""

    def __call__(self) -> None:
        """One whole step."""

    def close(self) -> None:
        """Release everything, after a step in flight. A second call does nothing."""

    def __enter__(self) -> Any:
        """The reducer itself."""

    def __exit__(self, *exception: object) -> None:
        """`close`; after an exception only what this rank can release alone."""


class Reduction(NamedTuple):
    """What is to be reduced over what: the argument of every planner of a `Reducer`.

    comm: the ranks: an MPI communicator, or a `nccl.Communicator`. operator: an `operator.Operator`, or one
    of its kinds where the planner says so. buffer: C-contiguous array of `memory` (a `memory.Memory`; a
    `Stream` of a GPU), views as [records, operator.width]. Chunks are cut between groups of `group` records.
    """

    comm: Any
    operator: Any
    buffer: Any
    group: int = 1
    memory: Any = HOST

    def records(self, name: str) -> Any:
        """The buffer as [records, operator.width]. Raises `ScheduleError`, naming the scheme `name`."""
        if not self.buffer.flags.c_contiguous or self.buffer.dtype != self.operator.dtype:
            raise ScheduleError(f"{name}: the buffer must be C-contiguous {self.operator.dtype}")
        return self.buffer.reshape(-1, self.operator.width)


@contextmanager
def communicators_left() -> Iterator[None]:
    """Around what makes communicators: raises `TransportError` where the MPI library has none left."""
    from mpi4py import MPI

    try:
        yield
    except MPI.Exception as error:
        reason = error.Get_error_string().splitlines()[-1].strip()
        raise TransportError(
            f"MPI gives no communicator for this reduction ({reason}): call close() on decoders and reducers "
            "that are done with, or use them in a with statement"
        ) from error


def duplicate(comm: Intracomm) -> Intracomm:
    """A private communicator of the same ranks. Collective.

    Raises `TransportError` where the MPI library has none left: each that is not closed keeps one.
    """
    with communicators_left():
        return comm.Dup()


class PlannedReducer(ABC):
    """The states of a `Reducer` and their order: idle, running, closed."""

    certificate: Certificate | None = None
    sent: list[tuple[int, int]] | Sent | None = None
    _running = False
    _closed = False

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def _begin(self) -> None:
        """The first part of a step."""

    @abstractmethod
    def _complete(self) -> None:
        """The rest of it."""

    @abstractmethod
    def _release(self) -> None:
        """The end. Collective; no step is in flight."""

    def _abandon(self) -> None:  # noqa: B027 - there may be nothing to do
        """The end of this rank alone, after an error: a step may be in flight, nobody may be waited for."""

    def _step(self) -> None:
        """A whole step, where that is less than its parts."""
        self._begin()
        self._complete()

    def _check(self) -> None:
        """Raise `ScheduleError` unless a step may begin."""
        if self._running or self._closed:
            state = "closed" if self._closed else "already running"
            raise ScheduleError(f"{self.name}: a step on a reducer that is {state}")

    def start(self) -> None:
        """Begin a step."""
        self._check()
        self._running = True
        self._begin()

    def wait(self) -> None:
        """Finish the step that `start` began."""
        if not self._running:
            raise ScheduleError(f"{self.name}: wait() without start()")
        self._complete()
        self._running = False

    def __call__(self) -> None:
        """One whole step."""
        self._check()
        self._running = True
        self._step()
        self._running = False

    def close(self) -> None:
        """Release everything, after a step in flight. Collective; a second call does nothing."""
        if not self._closed:
            if self._running:
                self.wait()
            self._closed = True
            self._release()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exception: object) -> None:
        # Closing is collective: a rank that fails alone must not wait for the others.
        if exception[0] is None:
            self.close()
        elif not self._closed:
            self._closed = True
            if self._running:
                _abandoned.append(self)
            self._abandon()


# Reducers that an error left in the middle of a step: messages may still arrive in their memory.
_abandoned: list[PlannedReducer] = []
