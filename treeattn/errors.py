"""Every exception that this package raises on purpose, on one screen.

A message says what is wrong, where (scheme, size, round, rank) and what to do about it.
"""

from __future__ import annotations

from typing import Any


class TreeattnError(Exception):
    """The base of every error below: ``except treeattn.TreeattnError`` catches them all."""

    #: Exit code of the ``treeattn`` command, 2 where its caller can mend the command line or a file.
    exit_code = 1

    def __init__(self, *args: Any) -> None:
        super().__init__(*(one_line(arg) if isinstance(arg, str) else arg for arg in args))


class ArgumentError(TreeattnError, ValueError):
    """An argument or an input file that cannot be used, or that differs between ranks."""

    exit_code = 2


class ScheduleError(TreeattnError, ValueError):
    """A schedule that is not a correct reduction, or a scheme name that does not parse."""

    exit_code = 2


class RestrictionError(ScheduleError):
    """A scheme that exists but does not serve this size, these nodes or these parameters."""


class BackendError(TreeattnError, RuntimeError):
    """A device, compiler or library that the chosen backend needs is missing or failed."""


class MissingPackageError(BackendError, ImportError):
    """A package of an extra that is not installed."""


class TransportError(TreeattnError, RuntimeError):
    """Records cannot travel the way that was asked for."""

    exit_code = 2


class PeerError(TransportError):
    """Another rank has ended or failed, or cannot be reached any more, while records travel."""

    exit_code = 1


class PeerTimeoutError(PeerError):
    """A wait for other ranks has reached the limit of ``TREEATTN_TIMEOUT``."""

    exit_code = 124  # as timeout(1)


class StateError(TreeattnError, RuntimeError):
    """A call out of order: on what is closed, before the call that it needs, or a second time."""


class SharingError(TransportError):
    """Ranks of one node cannot share memory."""


#: What belongs to the process that forked this one, in a sentence that says so.
ANOTHER_PROCESS = "another process's: no communicator outlives a fork, so start workers by spawn instead"


def one_line(message: str) -> str:
    """Whatever it quotes of an input: control characters are escaped, a long one is cut in its middle."""
    if not message.isprintable():
        message = "".join(one if one.isprintable() else repr(one)[1:-1] for one in message)
    return message if len(message) <= 1600 else f"{message[:1000]} .. {message[-500:]}"
