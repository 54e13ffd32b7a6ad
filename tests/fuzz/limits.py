"""What reading one file may take: so much processor time and memory."""

import contextlib
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SECONDS, MEMORY = 10, 1 << 30


class TooLong(BaseException):
    """No `Exception`: a reader takes each of those for the file's fault."""


@contextlib.contextmanager
def limited_memory() -> Iterator[None]:
    """As much more than this process has now."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextlib.contextmanager
def limited_time() -> Iterator[None]:
    """Processor time of this process, whatever else the machine does."""

    def over(*_: Any) -> None:
        raise TooLong(f"took more than {SECONDS} s of processor time")

    before = signal.signal(signal.SIGPROF, over)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
