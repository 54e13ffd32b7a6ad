"""A reduction that goes on by itself while its caller does other work."""

from __future__ import annotations

import atexit
import threading
import weakref
from queue import SimpleQueue

from treeattn.collectives.runtime import watchdog
from treeattn.collectives.runtime.reducer import Reducer
from treeattn.errors import TransportError

_PATIENCE = 0.5  # seconds for a thread to come back that looks up every twentieth of one


class ProgressThreadReducer(Reducer):
    """Another reducer, which it then owns, with a thread that waits for what `start` began.

    MPI moves messages while somebody is in one of its calls: without this thread, or calls of `test`, all
    rounds but the first travel within `wait`. The thread wants a core of its own, as MPI libraries wait. A
    whole step, which nothing overlaps, is run without it.
    """

    def __init__(self, reducer: Reducer) -> None:
        super().__init__(reducer.name)
        self._reducer = reducer
        self.certificate, self.sent, self.executor = reducer.certificate, reducer.sent, reducer.executor
        self.fallback = reducer.fallback
        self._begun: SimpleQueue[bool] = SimpleQueue()  # False: no step will follow
        self._ended: SimpleQueue[BaseException | None] = SimpleQueue()  # with what it raised
        # A thread that waits for ever must not keep the process from its end.
        self._thread = threading.Thread(target=self._follow, name=f"treeattn {self.name}", daemon=True)
        self._thread.start()
        _living.add(self)

    def _follow(self) -> None:
        while self._begun.get():
            try:
                self._reducer.wait()
            except BaseException as error:
                self._ended.put(error)
            else:
                self._ended.put(None)

    def waits_for(self) -> tuple[str, str]:
        return self._reducer.waits_for()

    def _step(self) -> None:
        self._reducer()

    def _begin(self) -> None:
        self._reducer.start()
        self._begun.put(True)

    def _advance(self) -> bool:
        return not self._ended.empty()

    def _complete(self) -> None:
        error = self._ended.get()
        if error is not None:
            raise error

    def _let_end(self) -> None:
        """A step that nobody finishes, at the end of the process: its thread would be in MPI meanwhile."""
        if self._running:
            watchdog.poll(self._advance, _PATIENCE)

    def _release(self) -> None:
        self._begun.put(False)
        self._reducer.close()

    def _abandon(self) -> None:
        """The thread is called back: in MPI at the process's end it would bring that down. Out of a call that
        does not come back to Python (executor "mpi", a library) it cannot be, and is left there."""
        self._begun.put(False)
        self._reducer.__exit__(RuntimeError)
        self._thread.join(_PATIENCE)


_living: weakref.WeakSet[ProgressThreadReducer] = weakref.WeakSet()


@atexit.register
def _let_all_end() -> None:
    for reducer in list(_living):
        reducer._let_end()


def check_threads() -> None:
    """Raise `TransportError` unless MPI lets several threads call it at once."""
    from mpi4py import MPI

    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise TransportError(
            "MPI was started for one thread at a time, and progress='thread' makes calls from a second: let "
            "mpi4py start it (mpi4py.rc.thread_level = 'multiple', its default), or take progress='calls'"
        )
