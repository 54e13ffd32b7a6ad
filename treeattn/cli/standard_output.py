"""Standard output of the command: what cannot be written ends no rank in the middle of collective work."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO


class StandardOutput:
    """Text on its way to `screen`; the first error is kept for the end. Without a screen nothing is shown.

    A reader that has seen enough is no error.
    """

    def __init__(self, screen: TextIO | None) -> None:
        self._screen = screen or open(os.devnull, "w")  # noqa: SIM115
        self._closed = screen is None
        self._problem: OSError | None = None
        if isinstance(screen, io.TextIOWrapper):
            screen.reconfigure(errors="replace")  # tables have characters that not every terminal knows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._screen, name)

    def write(self, text: str) -> int:
        """Show it, unless that has failed before."""
        if self._closed and text:
            self._problem = OSError(errno.EBADF, "is closed")
        self._unless_lost(self._screen.write, text)
        return len(text)

    def flush(self) -> None:
        self._unless_lost(self._screen.flush)

    def _unless_lost(self, do: Callable[..., object], *given: str) -> None:
        if self._problem is None:
            try:
                do(*given)
            except OSError as error:
                self._problem = error

    def verdict(self, code: int) -> int:
        """The exit code of a command that would leave with `code`: 1 where its output was lost, which is
        told."""
        self.flush()
        if self._problem is None:
            return code
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter flushes what is left once more
        if isinstance(self._problem, BrokenPipeError):
            return code
        print(f"treeattn: standard output: {self._problem.strerror}; print to another place", file=sys.stderr)
        return code or 1
