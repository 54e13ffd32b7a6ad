"""When ranks enter a step, in words that `simulate` takes:

together; random:100us (each up to so late), exponential:100us (on average), ascending:100us (rank by
rank, the last so late), late:100us (one rank, another each time); 0us+0us+20us, the instant of each rank
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from treeattn.errors import ArgumentError

_MICROSECONDS = {"us": 1.0, "µs": 1.0, "ms": 1e3, "s": 1e6}
_MOST = 1e9  # microseconds, of any wait

#: Of a generator and a number of ranks: the share of the spread that each is late by.
_PATTERNS: Mapping[str, Callable[[Any, int], Any]] = {
    "random": lambda draw, ranks: draw.random(ranks),
    "exponential": lambda draw, ranks: draw.standard_exponential(ranks),
    "ascending": lambda _, ranks: np.arange(ranks) / max(ranks - 1, 1),
    "late": lambda draw, ranks: np.where(np.arange(ranks) == draw.integers(ranks), 1.0, 0.0),
}


class Arrivals(NamedTuple):
    """When ranks enter a step. text: in words; spread: microseconds that the pattern is scaled by; given: the
    instant of each rank, of a pattern that is none of those known."""

    text: str
    pattern: str = ""
    spread: float = 0.0
    given: tuple[float, ...] = ()

    @property
    def drawn(self) -> bool:
        """Whether the instants differ from step to step."""
        return self.pattern not in ("", "ascending")

    def check(self, ranks: int) -> None:
        """Raise `ArgumentError` where instants are given for another number of ranks."""
        if self.given and len(self.given) != ranks:
            raise ArgumentError(
                f"arrivals {self.text}: {len(self.given)} instants for {ranks} ranks; give one for each"
            )

    def starts(self, step: int, ranks: int) -> list[float]:
        """Microseconds after the first possible instant, of each rank in that step."""
        if self.given:
            return list(self.given)
        if not self.pattern:
            return [0.0] * ranks
        draw = np.random.default_rng([0, step])
        return [self.spread * share for share in _PATTERNS[self.pattern](draw, ranks).tolist()]


TOGETHER = Arrivals("together")


def arrivals(text: str) -> Arrivals:
    """Read the words of arrivals. Raises `ArgumentError`."""
    pattern, _, spread = text.partition(":")
    if text == TOGETHER.text:
        return TOGETHER
    if pattern in _PATTERNS:
        return Arrivals(text, pattern, duration(spread))
    if "+" in text:
        return Arrivals(text, given=tuple(map(duration, text.split("+"))))
    known = ", ".join([TOGETHER.text, *(f"{name}:100us" for name in _PATTERNS)])
    raise ArgumentError(f"{text!r:.60}: take {known}, or the instant of each rank as 0+20us")


def duration(text: str) -> float:
    """Microseconds of 0, 100us, 1ms. Raises `ArgumentError`."""
    read = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)(us|µs|ms|s)", text.strip())
    value = float(read[1]) * _MICROSECONDS[read[2]] if read else 0.0
    if (read or text.strip() == "0") and value < _MOST:
        return value
    raise ArgumentError(f"{text!r:.40}: give 0 or a time with its unit, such as 100us or 1ms")
