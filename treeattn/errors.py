"""Every exception that this package raises on purpose, on one screen.

A message says what is wrong, where (scheme, size, round, rank) and what to do about it.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "ArgumentError",
    "BackendError",
    "RestrictionError",
    "ScheduleError",
    "SharingError",
    "TransportError",
    "TreeattnError",
    "no_communicator",
]


class TreeattnError(Exception):
    """The base of every error below: ``except treeattn.TreeattnError`` catches them all."""


class ArgumentError(TreeattnError, ValueError):
    """An argument or an input file that cannot be used, or that differs between ranks."""


class ScheduleError(TreeattnError, ValueError):
    """A schedule that is not a correct reduction, a scheme name that does not parse, a step out of order."""


class RestrictionError(ScheduleError):
    """A scheme that exists but does not serve this size, these nodes or these parameters."""


class BackendError(TreeattnError, RuntimeError):
    """A device, compiler or library that the chosen backend needs is missing or failed."""


class TransportError(TreeattnError, RuntimeError):
    """Records cannot travel the way that was asked for."""


class SharingError(TransportError):
    """Ranks of one node cannot share memory."""


def no_communicator(error: Any) -> TransportError:
    """What to raise for an exception of MPI that says that there are no more communicators."""
    reason = error.Get_error_string().splitlines()[-1].strip()
    return TransportError(
        f"MPI gives no communicator ({reason}): decoders and reducers keep one each until close() or the "
        "end of their with statement; for good where an exception ended that"
    )
