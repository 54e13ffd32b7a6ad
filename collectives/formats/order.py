"""What comes before what: operations of all ranks, each of which waits for some others."""

from __future__ import annotations

from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter

from treeattn.errors import ScheduleError

#: An order keeps a bit for each pair of operations: 128 MB at the limit.
OPERATION_LIMIT = 1 << 15


class Order:
    """`after[n]` are the operations that operation n waits for, `named[n]` how an error calls it.

    Raises `ScheduleError` for operations that wait for each other.
    """

    def __init__(self, after: Sequence[Sequence[int]], named: Sequence[str]) -> None:
        if len(after) > OPERATION_LIMIT:
            raise ScheduleError(f"{len(after)} operations, the limit is {OPERATION_LIMIT}")
        self.named = named
        try:
            self.sorted = list(TopologicalSorter(dict(enumerate(after))).static_order())
        except CycleError as error:
            cycle = ", ".join(named[number] for number in error.args[1][1:4])
            raise ScheduleError(f"deadlock: {cycle} wait for each other") from None
        self._before = [0] * len(after)
        for number in self.sorted:
            for earlier in after[number]:
                self._before[number] |= self._before[earlier] | 1 << earlier

    def before(self, first: int, second: int) -> bool:
        """Whether `first` is always done when `second` begins."""
        return bool(self._before[second] >> first & 1)
