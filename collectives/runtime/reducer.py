"""What a reduction over ranks is to its caller, whoever does the work: schedules, libraries, baselines;
and which thread uses an object."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias, TypeVar

from treeattn.collectives.check import Certificate
from treeattn.collectives.runtime import watchdog
from treeattn.collectives.runtime.memory import HOST, Array, PeerArray, Requests
from treeattn.errors import ANOTHER_PROCESS, PeerError, ScheduleError, StateError

T = TypeVar("T")

#: What a rank hands over in a step: (destination, bytes) of every message, or the bytes of a library's
#: collectives, whose messages are the library's business; None where only the library knows.
Sent: TypeAlias = list[tuple[int, int]] | int | None


class NativeStep(NamedTuple):
    """A reducer's step as a part of a larger C call, which is the caller's.

    function: address of ``int64_t function(void *state, int64_t nanoseconds)``, which gives 0 when the step
    is done, and more after waiting for so long. as_step: makes the larger call a step of the reducer. The
    call gives what `function` gave, or less than 0 if it did not come to it; the step gives the same, after
    the reducer has ended what `function` did not, and -1, without the call, where no step may begin.
    """

    function: int
    state: int
    nanoseconds: int
    as_step: Callable[[Callable[[], int]], Callable[[], int]]


class ReductionSpec(NamedTuple):
    """What is to be reduced over what: the argument of every planner of a `Reducer`.

    comm: the ranks: a communicator, or NCCL's (`nccl.NcclCommunicator`). operator: an `operator.Operator`, or
    one of its kinds where the planner says so. buffer: C-contiguous array of `memory` (a `memory.Memory`; a
    `Stream` of a GPU), views as [records, operator.width]. granularity: chunks are cut at multiples of so
    many records.
    """

    comm: Any
    operator: Any
    buffer: Array
    granularity: int = 1
    memory: Any = HOST

    def records(self, name: str) -> Array:
        """The buffer as [records, operator.width]. Raises `ScheduleError`, naming the scheme `name`."""
        if not self.buffer.flags.c_contiguous or self.buffer.dtype != self.operator.dtype:
            raise ScheduleError(f"{name}: the buffer must be C-contiguous {self.operator.dtype}")
        return self.buffer.reshape(-1, self.operator.width)


class Owner:
    """The thread of an object: the first that uses it, for as long as that runs.

    Making an object is no use of it: another thread may then take it. A step compares `thread` itself, which
    costs no call of Python: ``if threading.get_ident() != owner.thread: owner.take()``.
    """

    __slots__ = ("_holder", "_what", "thread")

    def __init__(self, what: str) -> None:
        """what: the object, as an error names it."""
        self._what, self.thread = what, 0
        self._holder = threading.current_thread()  # of `thread`, whose number a later thread may get

    def take(self) -> None:
        """From here on it is this thread's. Raises `StateError` where another has it and still runs."""
        here = threading.get_ident()
        if self.thread != here:
            with _lock:
                self.check()
                self.thread, self._holder = here, threading.current_thread()

    def check(self) -> None:
        """Raise `StateError` where another thread has it and still runs."""
        if self.thread in (0, threading.get_ident()) or not self._holder.is_alive():
            return
        if self.thread in sys._current_frames():  # threads that Python did not start are always alive to it
            raise StateError(
                f"{self._what} is used by another thread ({self._holder.name}), which still runs: each "
                "thread takes its own, and over several ranks a communicator of its own, too"
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
    """The owner of what threads may share."""

    def check(self) -> None:
        """Any thread may use it at any time."""


def owner_of_communicator(size: int) -> Owner:
    """The owner of a communicator of so many ranks: with several it is one thread's, since ranks whose
    threads come in another order would take one another's messages; a single rank sends none."""
    return Owner("this communicator") if size > 1 else Anyone("a communicator of one rank")


class Messages(ABC):
    """The messages of one reducer, planned round by round. Python runs `start`, `test` and `wait` for each of
    them, or compiled code calls what `fields` name."""

    def __init__(self, name: str) -> None:
        """name: of the schedule."""
        self._name = name
        self._peers: defaultdict[int, list[int]] = defaultdict(list)  # of each round's, in their order

    @abstractmethod
    def add(self, number: int, receives: Iterable[PeerArray], sends: Iterable[PeerArray]) -> None:
        """Plan the messages (array, peer) of a round."""

    @abstractmethod
    def start(self, number: int) -> None:
        """Start the messages of a round."""

    @abstractmethod
    def test(self, number: int) -> bool:
        """Whether those that were started have come and gone, as far as that is known without waiting."""

    @abstractmethod
    def wait(self, number: int) -> None:
        """Return when all messages of a round have come and gone."""

    @property
    @abstractmethod
    def rounds(self) -> dict[int, Requests]:
        """The C structs of the messages of each round that has some. After the last `add`."""

    @abstractmethod
    def fields(self) -> dict[str, Any]:
        """The fields of `StepStruct` by which the compiled code sends. Read after `rounds`."""

    def polled(self, poll: Callable[[], int]) -> Callable[[], int]:
        """`poll`, which goes on with a step, without waiting for a message."""
        return poll

    @abstractmethod
    def failure(self, number: int, code: int) -> BaseException:
        """What a code that is not 0 is raised as, in that round."""

    def lost(self, number: int, why: str, peers: Iterable[int] = ()) -> PeerError:
        """The error of a round. peers: of all its messages, unless some are known to be concerned."""
        named = " and ".join(map(str, sorted({*(peers or self._peers[number])})))
        return PeerError(f"{self._name}, round {number}: the messages with rank {named} failed: {why}")

    @abstractmethod
    def free(self) -> None:
        """What this rank can release alone, where no message is under way."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. Collective."""


class Reducer(ABC):
    """Folds the records of all ranks, in place, once a step. Planning, a step and closing are collective.

    ``start()`` begins a step and returns, so that other work can overlap; ``test()`` goes on with it without
    waiting; ``wait()`` ends it; a call is all of it. Over a GPU's stream a step is queued and not waited for.
    The states (idle, running, failed, closed) are kept here; a way of reducing writes `_begin`, `_complete`
    and `_release`, and `_advance` where it can go on without waiting.
    """

    #: What is proved of the schedule; None where nothing is, because a library decides.
    certificate: Certificate | None = None
    sent: Sent = None
    #: Which of `treeattn.collectives.executors` runs the schedule; None where there is none.
    executor: str | None = None
    #: Why no faster executor runs it, in one line; None where the fastest does.
    fallback: str | None = None
    #: `Messages`, which a library wants freed before its end; None where there are none.
    messages: Any = None
    #: Whether a step is queued to a stream, or nothing at all: then it can be recorded.
    stream_ordered = False
    #: Whether a step does nothing to the records: a rank that is alone has nothing to merge.
    idle = False
    _number = 0  # of steps that were begun
    _running = 0  # the one that is
    _resting = False  # between start() and wait()
    _closed = False
    _failed = False
    _disowned = False

    def __init__(self, name: str) -> None:
        self.name = name
        _living.add(self)
        watchdog.register(self)

    @property
    def blocking(self) -> int:
        """The step that may wait for other ranks now, as `watchdog.register` asks."""
        return 0 if self._resting or self._failed else self._running

    def waits_for(self) -> tuple[str, str]:
        """Where that step is, and which ranks it waits for."""
        return self.name, "the other ranks"

    @abstractmethod
    def _begin(self) -> None:
        """Start a step: what can be sent before anything arrives."""

    @abstractmethod
    def _complete(self) -> None:
        """The rest of the step: returns when this rank's result is whole."""

    @abstractmethod
    def _release(self) -> None:
        """The end. Collective; no step is in flight."""

    def _advance(self) -> bool:
        """Go on with what `_begin` began, without waiting; whether `_complete` could now return at once."""
        return False

    def _abandon(self) -> None:
        """Local teardown after an error: must not communicate; a step may be `in_flight`."""
        if self.messages is not None and not self.in_flight:
            self.messages.free()

    @property
    def in_flight(self) -> bool:
        """Whether a step has begun and not ended, perhaps because it failed."""
        return self._running > 0

    def _step(self) -> None:
        """A whole step, where that is less than its parts."""
        self._begin()
        self._complete()

    def _check(self) -> None:
        """Raise `StateError` unless a step may begin."""
        if self._running or self._closed:
            raise StateError(f"{self.name}: a step on a reducer that is {self._state()}")

    def native_step(self) -> NativeStep | None:
        """A step for C code that does more in one call; None where no C function runs one."""
        return None

    def queued(self, work: Any) -> tuple[Any, ...] | None:
        """What a step queues, launches and graphs, then `work` on its records, as their device planned it;
        None where a step does more."""
        return None

    def _check_running(self, call: str) -> None:
        """Raise `StateError` unless a step is on its way."""
        if not self._running or self._failed:
            lacking = f"on a reducer that is {self._state()}" if self._disowned else "without start()"
            raise StateError(f"{self.name}: {call} {lacking}")

    def _state(self) -> str:
        if self._disowned:
            return ANOTHER_PROCESS
        return "closed" if self._closed else "failed" if self._failed else "already running"

    def disown(self) -> None:
        """Give it up after a fork, in the new process: nothing of it may be used, released or ended there."""
        self._closed = self._disowned = True
        self._running = 0

    def start(self) -> None:
        """Begin a step. Raises `StateError` if one is running, or after the end."""
        self._check()
        self._running = self._number = self._number + 1
        self._run(self._begin)
        self._resting = True

    def test(self) -> bool:
        """Go on with the step that `start` began as far as that takes no waiting; whether it is all there.

        Where nothing can be done without waiting, it never is. Raises `StateError` as `wait` does, which
        is still to be called.
        """
        self._check_running("test()")
        return self._run(self._advance)

    def wait(self) -> None:
        """Finish the step that `start` began. Raises `StateError` if there is none."""
        self._check_running("wait()")
        self._resting = False
        self._run(self._complete)
        self._running = 0

    def __call__(self) -> None:
        """Make one whole step: `start` and `wait`."""
        self._check()
        self._running = self._number = self._number + 1
        try:  # as `_run`, without the call: this is in every step
            self._step()
        except BaseException:
            self._failed = True
            raise
        self._running = 0

    def step_by(self, work: Callable[[], T]) -> Callable[[], T]:
        """A call of the reducer that does `work` in place of `_step`."""

        def step() -> T:
            self._check()
            self._running = self._number = self._number + 1
            done = self._run(work)
            self._running = 0
            return done

        return step

    def _run(self, part: Callable[[], T]) -> T:
        """What fails half-way stays running: messages may be in flight, and no other step may begin."""
        try:
            return part()
        except BaseException:
            self._failed = True
            raise

    def synchronize(self) -> None:  # noqa: B027 - there may be nothing to do
        """Wait for steps that are `stream_ordered`; others are done when they return."""

    def close(self) -> None:
        """Release everything, after a step in flight. Collective; a second call does nothing."""
        if self._failed:
            self._leave()
        elif not self._closed:
            if self._running:
                self.wait()
            self._closed = True
            self._release()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exception: object) -> None:
        """`close`; after an exception only what this rank can release alone."""
        if exception[0] is None:
            self.close()
        else:
            self._leave()

    def _leave(self) -> None:
        """The end where closing, which is collective, would wait for others."""
        if not self._closed:
            self._closed = True
            if self._running:
                _abandoned.append(self)
            self._abandon()


_lock = threading.Lock()
_living: weakref.WeakSet[Reducer] = weakref.WeakSet()


def _forget() -> None:
    """In a forked process: threads are not there, requests and shared memory belong to the one before."""
    for reducer in list(_living):
        reducer.disown()
    _living.clear()


os.register_at_fork(after_in_child=_forget)


@atexit.register
def _exit_all() -> None:
    for reducer in list(_living):
        Reducer._abandon(reducer)


# Reducers that an error left in the middle of a step: messages may still arrive in their memory.
_abandoned: list[Reducer] = []
