"""When ranks enter a step, in words that `simulate` takes:

together; random:100us (each up to so late), exponential:100us (on average), ascending:100us (rank by
rank, the last so late), late:100us (one rank, another each time); 0us+0us+20us, the instant of each
rank; FILE of a line for each step, in µs
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
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
    instants of each rank for steps in turn, of a pattern that is none of those known."""

    text: str
    pattern: str = ""
    spread: float = 0.0
    given: tuple[tuple[float, ...], ...] = ()

    @property
    def drawn(self) -> bool:
        """Whether the instants differ from step to step."""
        return len(self.given) > 1 or self.pattern not in ("", "ascending")

    def check(self, ranks: int) -> None:
        """Raise `ArgumentError` where instants are given for another number of ranks."""
        if self.given and len(self.given[0]) != ranks:
            raise ArgumentError(
                f"arrivals {self.text}: {len(self.given[0])} instants for {ranks} ranks; give one for each"
            )

    def starts(self, step: int, ranks: int, seed: int = 0) -> list[float]:
        """Microseconds after the first possible instant, of each rank in that step."""
        if self.given:
            return list(self.given[step % len(self.given)])
        if not self.pattern:
            return [0.0] * ranks
        draw = np.random.default_rng([seed, step])
        return [self.spread * share for share in _PATTERNS[self.pattern](draw, ranks).tolist()]


TOGETHER = Arrivals("together")


def arrivals(text: str) -> Arrivals:
    """Read the words of arrivals, or their file. Raises `ArgumentError`."""
    pattern, _, spread = text.partition(":")
    if text == TOGETHER.text:
        return TOGETHER
    if pattern in _PATTERNS:
        return Arrivals(text, pattern, duration(spread))
    if "+" in text:
        return Arrivals(text, given=(tuple(map(duration, text.split("+"))),))
    if Path(text).suffix in (".txt", ".csv"):
        return _from_file(text)
    known = ", ".join([TOGETHER.text, *(f"{name}:100us" for name in _PATTERNS)])
    raise ArgumentError(f"{text!r:.60}: take {known}, the instant of each rank as 0+20us, or FILE.csv")


def _from_file(name: str) -> Arrivals:
    try:
        content = Path(name).read_text()
        rows = [line.replace(",", " ").split() for line in content.splitlines()]
        given = tuple(tuple(map(float, row)) for row in rows if row and not row[0].startswith("#"))
    except (OSError, ValueError) as error:
        raise ArgumentError(
            f"{name}: cannot be read ({error}); microseconds of each rank, a line a step"
        ) from None
    if not given or len(set(map(len, given))) > 1:
        raise ArgumentError(f"{name}: give lines of equally many numbers, microseconds of each rank")
    if not all(0 <= one < _MOST for row in given for one in row):
        raise ArgumentError(f"{name}: instants are microseconds from 0 on; take the earliest off all")
    digest = hashlib.sha256(content.encode()).hexdigest()[:8]
    return Arrivals(f"{Path(name).name}@{digest}", given=given)


def duration(text: str) -> float:
    """Microseconds of 0, 100us, 1ms. Raises `ArgumentError`."""
    read = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)(us|µs|ms|s)", text.strip())
    value = float(read[1]) * _MICROSECONDS[read[2]] if read else 0.0
    if (read or text.strip() == "0") and value < _MOST:
        return value
    raise ArgumentError(f"{text!r:.40}: give 0 or a time with its unit, such as 100us or 1ms")
