"""The attention mask as rules by position, which become one or two ranges of a shard's tokens per query."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from treeattn.attention.positions import MAX_POSITION, Runs
from treeattn.attention.shape import check_number
from treeattn.errors import ArgumentError

#: Kernels take these numbers as float32, whatever the inputs are.
_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class Rules:
    """What a query may attend to, and what becomes of its logits; equal on all ranks.

    With t the position of the query and s that of a key in the whole sequence, the logit is ``scale * q.k``,
    then ``softcap * tanh(logit / softcap)``, then less ``alibi * (t - s)``. Draft tokens obey their mask
    alone.

    Parameters
    ----------
    causal : bool
        Whether keys after the query (s > t) are masked out.
    window : (left, right), optional
        Only keys with ``t - left <= s <= t + right`` are seen; None is unbounded.
    leading : int
        Keys with ``s < leading`` are seen in spite of the window (attention sinks of StreamingLLM); counted
        from where the sequence begins.
    softcap : float, optional
        Bound of the logits, as in Gemma 2.
    alibi : [heads], optional
        Slope of each query head (Press et al., arXiv 2108.12409).
    sink_logits : [heads], optional
        Logit of one more key with the value 0, which counts once in the whole sequence, in lse too.

    Raises
    ------
    ArgumentError
        A value that cannot be; the message names it.

    Examples
    --------
    >>> rules = treeattn.Rules(causal=True, window=(1023, 0), leading=4)
    >>> rules.names  # what a query's position decides
    ('causal', 'window', 'leading')
    """

    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    leading: int = 0
    softcap: float | None = None
    alibi: ArrayLike | None = None
    sink_logits: ArrayLike | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.causal, bool | np.bool_):
            raise ArgumentError(f"causal must be True or False, not {self.causal!r:.60}")
        values = {
            "causal": bool(self.causal),
            "window": _window(self.window),
            "leading": _whole("leading", self.leading),
            "softcap": None if self.softcap is None else _softcap(self.softcap),
            "alibi": _by_head("alibi", self.alibi, finite=True),
            "sink_logits": _by_head("sink_logits", self.sink_logits, finite=False),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, rules: Rules | None, heads: int) -> Rules:
        """`rules`, none for None, of so many query heads. Raises `ArgumentError`."""
        if rules is None:
            return cls()
        if not isinstance(rules, Rules):
            raise ArgumentError(f"rules must be a treeattn.Rules, not {rules!r:.60}")
        rules.check_heads(heads)
        return rules

    @property
    def positional(self) -> bool:
        """Whether the position of a query matters."""
        return self.causal or self.window is not None or self.alibi is not None

    @property
    def by_tables(self) -> bool:
        """Whether kernels need tables even where no call brings a mask."""
        return self.positional or self.softcap is not None

    @property
    def names(self) -> tuple[str, ...]:
        """The rules that are in force, by the names of their arguments."""
        return tuple(name for name in self.__slots__ if getattr(self, name) not in (None, False, 0))

    def check_heads(self, heads: int) -> None:
        """Raise `ArgumentError` unless what is given by head is given for so many."""
        for name, values in (("alibi", self.alibi), ("sink_logits", self.sink_logits)):
            if values is not None and np.shape(values) != (heads,):
                raise ArgumentError(
                    f"{name} has shape {list(np.shape(values))}: one number for each of {heads} heads"
                )

    def intervals(self, runs: Runs, tokens: int, position: int, begins: int = 0) -> tuple[int, int, int, int]:
        """(begin, end, begin, end) of the tokens below `tokens` that a query at `position` may see, in a
        sequence that begins at `begins`: first the leading ones where a window keeps them apart from the
        rest, then the others; both ascend, and do not overlap. Indices of the shard."""
        end = min(tokens, runs.below(position + 1)) if self.causal else tokens
        first = min(end, runs.below(begins)) if begins else 0
        if self.window is None:
            return 0, 0, first, end
        left, right = self.window
        lead = min(end, runs.below(begins + self.leading))
        begin = first if left is None else runs.below(position - left)
        last = max(lead, end if right is None else min(end, runs.below(position + right + 1)))
        if begin <= lead:
            return 0, 0, first, last
        return first, lead, min(begin, last), last

    def all_intervals(
        self,
        runs: Runs,
        tokens: int | NDArray[np.int64],
        positions: NDArray[np.int64],
        begins: int | NDArray[np.int64] = 0,
    ) -> NDArray[np.int64]:
        """`intervals` of arrays that broadcast to [batch, queries]: int64 [batch, queries, 4]."""
        tokens, positions, begins = np.broadcast_arrays(tokens, positions, begins)
        end = np.minimum(tokens, runs.all_below(positions + 1)) if self.causal else tokens
        first = np.minimum(end, runs.all_below(begins))
        found = np.zeros((*positions.shape, 4), np.int64)
        found[..., 2], found[..., 3] = first, end
        if self.window is None:
            return found
        left, right = self.window
        lead = np.minimum(end, runs.all_below(begins + self.leading))
        begin = first if left is None else runs.all_below(positions - left)
        last = end if right is None else np.minimum(end, runs.all_below(positions + right + 1))
        last = np.maximum(last, lead)
        joined = begin <= lead
        found[..., 0] = np.where(joined, 0, first)
        found[..., 1] = np.where(joined, 0, lead)
        found[..., 2] = np.where(joined, first, np.minimum(begin, last))
        found[..., 3] = last
        return found


def _whole(name: str, value: Any) -> int:
    check_number(name, value, 0)
    return min(int(value), MAX_POSITION)  # which no token has


def _window(window: object) -> tuple[int | None, int | None] | None:
    if window is None:
        return None
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise ArgumentError(f"window must be (left, right), None where it is unbounded, not {window!r:.60}")
    left, right = (None if side is None else _whole("a side of the window", side) for side in window)
    return None if left is right is None else (left, right)


def _softcap(value: float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not _SMALLEST <= number <= _LARGEST:
        raise ArgumentError(f"softcap must be a number of float32 above 0, or None, not {value!r:.60}")
    return number


def _by_head(name: str, values: ArrayLike | None, *, finite: bool) -> tuple[float, ...] | None:
    if values is None:
        return None
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{name} cannot be read as numbers: {error}") from None
    if array.ndim != 1 or array.dtype.kind not in "fiu":
        raise ArgumentError(
            f"{name} is {array.dtype} of shape {list(array.shape)}: one number for each head is needed"
        )
    array = array.astype(np.float64)
    if not ((abs(array) <= _LARGEST) | ((array == -np.inf) & (not finite))).all():
        none = "" if finite else ", or -inf for none"
        raise ArgumentError(f"{name} must be finite numbers of float32{none}")
    return tuple(array.tolist())
