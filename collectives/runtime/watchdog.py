"""The watchdog: how long anything waits for other ranks, and what happens then.

A rank that hangs, that raises alone or that makes other calls leaves the others waiting, in calls of MPI and
NCCL that nothing can interrupt. So every wait has the limit that ``TREEATTN_TIMEOUT`` gives:

- What waits for a GPU polls (`poll`), what may be left behind runs in a thread (`call_with_timeout`): both
  can be given up, and the caller raises.
- A blocking call cannot. A thread looks at it now and then, and after the limit says what this rank waits
  for, which process is late where that can be seen, and ends the job (`register`, `Guarded`). A step and
  the calls of a communicator only count themselves (decision 8).
"""

from __future__ import annotations

import atexit
import faulthandler
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

from treeattn.errors import ANOTHER_PROCESS, ArgumentError, StateError

if TYPE_CHECKING:
    from treeattn.collectives.runtime.process import Process

T = TypeVar("T")

#: Seconds that anything waits for other ranks; 0: as long as it takes.
VARIABLE = "TREEATTN_TIMEOUT"
_DEFAULT = 600.0  # as torch.distributed gives NCCL

#: The exit code of a job that was ended because a wait had reached the limit, as of timeout(1).
TIMED_OUT = 124

_LOOKS = 4  # at least, that find one and the same step; looks, not seconds: a process may have been stopped
_INTERVAL = 2.0  # seconds between looks at the most
_SPIN = 1e-3  # seconds of polling before the processor is given away between two polls
_PAUSE = 1e-4


def limit() -> float:
    """Seconds that a wait may take; infinity for no limit.

    Raises `ArgumentError` for a setting that is no number of seconds.
    """
    text = os.environ.get(VARIABLE, "")
    try:
        seconds = float(text) if text else _DEFAULT
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= threading.TIMEOUT_MAX:
        raise ArgumentError(f"{VARIABLE}={text:.40}: give a number of seconds, 0 for no limit")
    return seconds or math.inf


def timeout_message(what: str, peers: str, seconds: float) -> str:
    """What to say when a wait has reached the limit. what: scheme and round; peers: who is waited for."""
    unseen = sum(size - len(roster()) for _, size, roster, _ in _jobs)
    elsewhere = f"; {unseen} ranks cannot be looked up from here" if unseen else ""
    return (
        f"{what}: {seconds:g} s without {peers}{_absent() or _PERHAPS + elsewhere}; if steps take so long, "
        f"set {VARIABLE} to more seconds, 0 for no limit"
    )


_PERHAPS = ", which hang, made other calls, or wait for others themselves (py-spy dump shows where)"


def poll(done: Callable[[], bool], seconds: float, meanwhile: Callable[[], object] = tuple) -> bool:
    """Poll until `done`; whether that was within so many seconds. meanwhile: called between polls after the
    first thousandth of a second."""
    began = time.monotonic()
    while not done():
        spent = time.monotonic() - began
        if spent > seconds:
            return False
        if spent > _SPIN:
            meanwhile()
            time.sleep(_PAUSE)
    return True


def call_with_timeout(seconds: float, call: Callable[[], object]) -> bool:
    """Whether `call` returns within so many seconds; what it raises is raised here. One that does not return
    is left behind in its thread, which does not keep the process alive."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(None if seconds == math.inf else seconds)
    if failed:
        raise failed[0]
    return not thread.is_alive()


class Watched(Protocol):
    """What blocks in calls that cannot be given up."""

    @property
    def blocking(self) -> int:
        """Number of the step that blocks now, another one each time; 0: none does."""

    def waits_for(self) -> tuple[str, str]:
        """Scheme and round; peers: as `timeout_message` takes them."""


def register(thing: Watched) -> None:
    """Look at `thing` for as long as it lives. Where the setting cannot be read, which planning says on all
    ranks alike, the default limit holds until then."""
    try:
        seconds = limit()
    except ArgumentError:
        seconds = _DEFAULT
    with _lock:
        _things.add(thing)
        if not _thread and seconds != math.inf:
            _thread.append(threading.Thread(target=_watch, args=(seconds,), daemon=True))
            _thread[0].start()


class Guarded:
    """``with guarded:`` around each of the blocking calls of a kind, one at a time. Entering only counts.

    patient: others may work for as long as they like, so that the limit holds only while one of them is
    seen not to run.
    """

    def __init__(self, what: str, peers: str = "the other ranks", *, patient: bool = False) -> None:
        """As `timeout_message` takes them."""
        self._what = what, peers
        self._patient = patient
        self._number = self._current = 0
        register(self)

    @property
    def blocking(self) -> int:
        waits = self._current and (not self._patient or _absent())
        return self._current if waits else 0

    def __enter__(self) -> None:
        self._number = self._current = self._number + 1

    def __exit__(self, *exception: object) -> None:
        self._current = 0

    def waits_for(self) -> tuple[str, str]:
        return self._what


class Activity:
    """``with activity:`` names what the calls of communicators within are for, when one of them waits."""

    def __init__(self, what: str, peers: str = "the other ranks") -> None:
        """As `timeout_message` takes them."""
        self._what = what, peers

    def __enter__(self) -> None:
        _activities.append(self._what)

    def __exit__(self, *exception: object) -> None:
        _activities.pop()


def introduce(
    rank: int,
    size: int,
    roster: Callable[[], Mapping[int, Process]],
    abort: Callable[[int], object] = int,
) -> None:
    """Tell this rank's place in the job, the processes that can be looked up from here, by rank, and what
    ends the job with an exit code, as far as that can be, before MPI starts."""
    _jobs[:] = [(rank, size, roster, abort)]


def at_the_end(call: Callable[[], object]) -> None:
    """Have it called when the process ends, after what the modules that import this one do then."""
    _last.append(call)


def finalize_mpi(call: Callable[[], object]) -> None:
    """Call it, which ends MPI. From here on there may be no communicator left to abort: a process that
    leaves in the middle ends the job, too."""
    _mpi_ends.append(True)
    with Guarded("the end of MPI"):
        call()


@atexit.register
def _end() -> None:
    while _last:
        _last.pop()()


def end_job(code: int) -> NoReturn:
    """End all ranks, from any thread: nothing else gets a rank out of a blocking call."""
    sys.stderr.flush()
    time.sleep(0.2)  # launchers drop what is under way when a job ends
    library: Any = sys.modules.get("mpi4py.MPI")  # not imported here: the main thread may be about to
    if not getattr(library, "Is_initialized", bool)():
        for *_, abort in _jobs:
            abort(code)
    elif not library.Is_finalized() and not _mpi_ends:
        last = threading.Timer(1.0, os._exit, (code,))  # where it lets no other thread end the job
        last.daemon = True
        last.start()
        library.COMM_WORLD.Abort(code)
    os._exit(code)


_lock = threading.Lock()
_things: weakref.WeakSet[Watched] = weakref.WeakSet()
_thread: list[threading.Thread] = []
_activities: list[tuple[str, str]] = []
_last: list[Callable[[], object]] = []
_mpi_ends: list[bool] = []


def _disown() -> None:
    """In a forked process: no thread looks at anything yet, and what its parent waits by is not its own."""
    global _lock
    _lock = threading.Lock()
    for inherited in (_things, _thread, _last, _activities):
        inherited.clear()


os.register_at_fork(after_in_child=_disown)


#: What `introduce` was told, if it was.
_jobs: list[tuple[int, int, Callable[[], Mapping[int, Process]], Callable[[int], object]]] = []


def _watch(seconds: float) -> None:
    """For the life of the process: nothing is done in a step but to count it."""
    interval = min(seconds / _LOOKS, _INTERVAL)
    seen: weakref.WeakKeyDictionary[Watched, tuple[int, int]] = weakref.WeakKeyDictionary()
    while True:
        time.sleep(_pause(interval))
        stalled = _stalled(seen, math.ceil(seconds / interval))
        if stalled is not None:
            speak(timeout_message(*stalled, seconds))


def _pause(interval: float) -> float:
    """Seconds to the next multiple of `interval` on the clock of the day, at least half of one away: ranks
    look at the same instants, so that one of them speaks for all."""
    left = interval - time.time() % interval
    return left if left > interval / 2 else left + interval


def _stalled(
    seen: weakref.WeakKeyDictionary[Watched, tuple[int, int]], most: int = _LOOKS
) -> tuple[str, str] | None:
    """What was found blocking in one and the same step by too many looks. seen: thing -> step, looks."""
    with _lock:
        things = list(_things)
    for thing in things:
        step = thing.blocking
        before, looks = seen.get(thing, (0, 0))
        looks = looks + 1 if step == before else 1
        seen[thing] = step, looks
        if step and looks > most:
            return thing.waits_for()
    return None


def _absent() -> str:
    """Which ranks are seen not to run, to follow the peers of a message; empty for none."""
    rosters = (roster() for _, _, roster, _ in _jobs)
    peers = [(rank, one.number, one.state) for known in rosters for rank, one in sorted(known.items())]
    late = [f"rank {rank} {_HAS[state]} (process {number})" for rank, number, state in peers if state in _HAS]
    return f": {', '.join(late)}" if late else ""


_HAS = {"stopped": "is stopped", "ended": "has ended"}


def speak(message: str, code: int = TIMED_OUT) -> NoReturn:
    """Say it and end all ranks. The lowest that waits is to speak for those that reach the limit at the same
    time."""
    rank = _jobs[0][0] if _jobs else 0
    time.sleep(min(0.3 * rank, 3.0))
    print(f"treeattn: rank {rank}: {message}", file=sys.stderr, flush=True)
    if code == TIMED_OUT:
        faulthandler.dump_traceback(sys.__stderr__ or 2)  # which line waits
    end_job(code)


class WatchedCalls(Guarded):
    """The blocking calls of one communicator."""

    def __init__(self) -> None:
        super().__init__("")
        self._process = os.getpid()

    def run(self, name: str, call: Callable[..., T], *arguments: Any, **options: Any) -> T:
        if self._process != os.getpid():
            raise StateError(f"what this process communicates by is {ANOTHER_PROCESS}")
        self._what = name, "the other ranks"
        with self:
            return call(*arguments, **options)

    def waits_for(self) -> tuple[str, str]:
        """The innermost activity of the caller, or the call; peers."""
        return _activities[-1] if _activities else self._what
