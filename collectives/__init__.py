"""Reductions over ranks as plain data: schedules, the catalogue of schemes, and the proof of each one.

Nothing here knows of attention. Executors move and merge records through an `runtime.operator.Operator`.
"""

from __future__ import annotations

if __name__ != "treeattn.collectives":
    # A second copy under another name would have its own Schedule and error classes, and
    # `except ScheduleError` would silently stop catching.
    raise ImportError(f"this package is imported as treeattn.collectives, not as {__name__}")

from treeattn.collectives.catalog import build, names, needs_nodes
from treeattn.collectives.check import Certificate, FoldOrder, Proof, check, prove
from treeattn.collectives.combinators import (
    on_chunks,
    on_ranks,
    reversed_as_copies,
    side_by_side,
    then,
    to_root,
)
from treeattn.collectives.schedule import Schedule, Transfer

__all__ = [
    "Certificate",
    "FoldOrder",
    "Proof",
    "Schedule",
    "Transfer",
    "build",
    "check",
    "names",
    "needs_nodes",
    "on_chunks",
    "on_ranks",
    "prove",
    "reversed_as_copies",
    "side_by_side",
    "then",
    "to_root",
]
