"""What executors need to know of the records that they move: their type, width and how two merge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["Operator"]


class Operator(Protocol):
    """A commutative, associative merge of records.

    An array of records is C-contiguous with shape [records, width]. The merge must give the same
    bits whichever operand comes first: schedules of class A and C rest on it.
    """

    @property
    def dtype(self) -> Any:
        """Element type of a record, a NumPy dtype."""

    @property
    def width(self) -> int:
        """Elements of one record."""

    def merge(self, into: Any, other: Any) -> None:
        """Fold `other` into `into`, in place. Both have shape [records, width]."""

    def planned_merge(self, into: Any, other: Any) -> Callable[[], object]:
        """`merge` for two arrays that never move: a call without arguments and without checks."""
