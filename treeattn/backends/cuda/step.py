"""A decoder's step on a GPU whose reduction is only queued."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from treeattn.backends.cuda.attention import PlannedAttention
from treeattn.collectives.runtime.reducer import Reducer
from treeattn.partial import Array


class PlannedStep:
    """`attention`, what `reducer` queues, and `finish`: the bits of the three parts."""

    def __init__(
        self,
        attention: PlannedAttention,
        reducer: Reducer,
        finish: Any,
        lengths: Callable[[Any, int], Any],
        forget: Callable[[], object],
    ) -> None:
        """reducer: one that is idle, or whose steps are all `queued`. lengths: makes of lengths and a number
        of tokens what `attention` takes. forget: drops the arrays that a closer look was taken at."""
        self._planned, self._reducer, self._lengths, self._forget = attention, reducer, lengths, forget
        behind = reducer.queued(finish) or ()
        # On a rank alone who stores the last of a record finishes it.
        self._attend = attention.finishing(finish) if reducer.idle else attention
        self._fold = reducer if reducer.idle else reducer.step_by(lambda: [launch() for launch in behind])

    def run(self, *given: Any) -> None:
        """A step over (q, k, v, lengths, block table)."""
        self._attend(*given)
        self._forget()
        self._fold()

    def __call__(self, q: Array, k: Array, v: Array, lengths: Any = None) -> bool:
        """One step. False: nothing was done, since arrays that are not laid out as the last ones were need a
        closer look, before `run`."""
        bound, reducer = self._planned.bound, self._reducer
        if not bound or not (type(q) is type(bound[0]) and type(k) is type(bound[1]) is type(v)):
            return False
        if len(k.shape) != 4:
            return False
        if lengths is not None and lengths is not bound[3]:
            lengths = self._lengths(lengths, k.shape[1])
        if not self._planned.takes(q, k, v, lengths):
            return False
        self._attend(q, k, v, lengths)
        if not reducer.idle or reducer._closed:
            self._fold()
        return True
