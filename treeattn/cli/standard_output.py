"""Standard output of the command: what cannot be written ends no rank in the middle of collective work."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import TextIO


class StandardOutput(io.TextIOBase):
    """Text on its way to `screen`; the first error is kept for the end. Without a screen nothing is shown.

    A reader that has seen enough is no error.
    """

    def __init__(self, screen: TextIO | None) -> None:
        self._screen = screen
        self._problem: OSError | None = None
        if isinstance(screen, io.TextIOWrapper):
            screen.reconfigure(errors="replace")  # tables have characters that not every terminal knows

    @classmethod
    def of_rank(cls, rank: int) -> StandardOutput:
        """The standard output of this process: ranks other than 0 repeat rank 0."""
        return cls(open(os.devnull, "w") if rank else sys.stdout)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._screen, "encoding", "utf-8")

    @property
    def errors(self) -> str:  # type: ignore[override]
        return getattr(self._screen, "errors", "replace")

    def isatty(self) -> bool:
        return self._screen is not None and self._screen.isatty()

    def write(self, text: str) -> int:
        """Show it, unless that has failed before."""
        if not isinstance(text, str):  # by which click asks whether bytes are written here
            raise TypeError(f"text is written here, not {type(text).__name__}")
        if self._problem is None and text:
            try:
                if self._screen is None:
                    raise OSError(errno.EBADF, "is closed")
                self._screen.write(text)
            except OSError as error:
                self._problem = error
        return len(text)

    def flush(self) -> None:
        if self._problem is None and self._screen is not None:
            try:
                self._screen.flush()
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
