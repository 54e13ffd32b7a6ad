"""How long anything waits for other ranks, and what happens then.

A rank that hangs, that raises alone or that makes other calls leaves the others waiting, in calls of MPI and
NCCL that nothing can interrupt. So every wait has the limit that ``TREEATTN_TIMEOUT`` gives:

- What waits for a GPU polls (`until`), what may be left behind runs in a thread (`within`): both can be given
  up, and the caller raises.
- A blocking call of MPI cannot. A thread looks at it now and then, and after the limit says what this rank
  waits for and ends the job (`watch`, `Waits`, `watched`). A step only counts itself (decision 8).
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

from treeattn.errors import ArgumentError

__all__ = ["VARIABLE", "Waits", "Watched", "limit", "overdue", "until", "watch", "watched", "within"]

#: Seconds that anything waits for other ranks; 0: as long as it takes.
VARIABLE = "TREEATTN_TIMEOUT"
_DEFAULT = 600.0  # as torch.distributed gives NCCL

_LOOKS = 4  # that find one and the same step; looks, not seconds: a process may have been stopped
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


def overdue(what: str, peers: str, seconds: float) -> str:
    """What to say when a wait has reached the limit. what: scheme and round; peers: who is waited for."""
    return (
        f"{what}: {seconds:g} s without {peers}, which hang, made other calls, or wait for others themselves "
        f"(py-spy dump shows where); if steps take so long, set {VARIABLE} to more seconds, 0 for no limit"
    )


def until(done: Callable[[], bool], seconds: float, meanwhile: Callable[[], object] = tuple) -> bool:
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


def within(seconds: float, call: Callable[[], object]) -> bool:
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
        """Scheme and round; peers: as `overdue` takes them."""


def watch(thing: Watched) -> None:
    """Look at `thing` for as long as it lives; not where the setting cannot be read, which planning says on
    all ranks alike."""
    try:
        seconds = limit()
    except ArgumentError:
        return
    if seconds == math.inf:
        return
    with _lock:
        _things.add(thing)
        if not _thread:
            _thread.append(threading.Thread(target=_look_on, args=(seconds,), daemon=True))
            _thread[0].start()


class Waits:
    """``with waits:`` around each of the blocking calls of a kind, one at a time. Entering only counts."""

    def __init__(self, what: str, peers: str = "the other ranks") -> None:
        """As `overdue` takes them."""
        self._what = what, peers
        self._number = self.blocking = 0
        watch(self)

    def __enter__(self) -> None:
        self._number = self.blocking = self._number + 1

    def __exit__(self, *exception: object) -> None:
        self.blocking = 0

    def waits_for(self) -> tuple[str, str]:
        """As `Watched`."""
        return self._what


def watched(what: str, peers: str = "the other ranks") -> Waits:
    """Around a blocking call that all ranks make once."""
    return Waits(what, peers)


_lock = threading.Lock()
_things: weakref.WeakSet[Watched] = weakref.WeakSet()
_thread: list[threading.Thread] = []


def _look_on(seconds: float) -> None:
    """For the life of the process: nothing is done in a step but to count it."""
    seen: weakref.WeakKeyDictionary[Watched, tuple[int, int]] = weakref.WeakKeyDictionary()
    while True:
        time.sleep(_pause(seconds / _LOOKS))
        late = _late(seen)
        if late is not None:
            _end_job(overdue(*late, seconds))


def _pause(interval: float) -> float:
    """To the next multiple of `interval` on the clock of the day, at least half of one away: ranks look at
    the same instants, so that one of them speaks for all."""
    left = interval - time.time() % interval
    return left if left > interval / 2 else left + interval


def _late(seen: weakref.WeakKeyDictionary[Watched, tuple[int, int]]) -> tuple[str, str] | None:
    """What was found blocking in one and the same step by too many looks. seen: thing -> step, looks."""
    with _lock:
        things = list(_things)
    for thing in things:
        step = thing.blocking
        before, looks = seen.get(thing, (0, 0))
        looks = looks + 1 if step == before else 1
        seen[thing] = step, looks
        if step and looks > _LOOKS:
            return thing.waits_for()
    return None


def _end_job(message: str) -> None:
    """Say it and end all ranks: nothing else gets a rank out of a blocking call. The lowest that waits is to
    speak for those that reach the limit at the same time."""
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank
    time.sleep(min(0.3 * rank, 3.0))
    print(f"treeattn: rank {rank}: {message}", file=sys.stderr, flush=True)
    time.sleep(0.2)  # launchers drop what is under way when a job ends
    last = threading.Timer(5.0, os._exit, (1,))  # where the library lets no other thread end the job
    last.daemon = True
    last.start()
    MPI.COMM_WORLD.Abort(1)
