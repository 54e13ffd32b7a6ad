"""Which thread uses an object: what a call leaves in it, results or bound arrays, is for its caller alone."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

from treeattn.errors import StateError

_lock = threading.Lock()


class Owner:
    """The thread of an object: the first that uses it, for as long as that runs.

    Making an object is no use of it: another thread may then take it. A step compares `thread` itself, which
    costs no call of Python: ``if threading.get_ident() != owner.thread: owner.take()``.
    """

    __slots__ = ("_what", "thread")

    def __init__(self, what: str) -> None:
        """what: the object, as an error names it."""
        self._what, self.thread = what, 0

    def take(self) -> None:
        """From here on it is this thread's. Raises `StateError` where another has it and still runs."""
        here = threading.get_ident()
        if self.thread != here:
            with _lock:
                self._check(here)
                self.thread = here

    def check(self) -> None:
        """Raise `StateError` where another thread has it and still runs."""
        self._check(threading.get_ident())

    def _check(self, here: int) -> None:
        if self.thread not in (0, here) and self.thread in sys._current_frames():
            other = {one.ident: one.name for one in threading.enumerate()}.get(self.thread, self.thread)
            raise StateError(
                f"{self._what} is used by another thread ({other}), which still runs: each thread takes its "
                "own, and over several ranks a communicator of its own, too"
            )

    def let_go(self) -> None:
        """Another thread may have it."""
        self.thread = 0

    @contextlib.contextmanager
    def during(self) -> Iterator[None]:
        """``with owner.during():`` around a call that leaves nothing to its thread: it is let go afterwards,
        unless it was this thread's before."""
        before = self.thread
        self.take()
        try:
            yield
        finally:
            if before != self.thread:
                self.let_go()


class Anyone(Owner):
    """Of what threads may share."""

    def take(self) -> None:
        """It may always be used."""

    def check(self) -> None:
        """As `take`."""


def of_communicator(size: int) -> Owner:
    """Of one of so many ranks: of several it is one thread's, since ranks whose threads come in another order
    would take one another's messages; who is alone waits for nobody."""
    return Owner("this communicator") if size > 1 else Anyone("a communicator of one rank")
