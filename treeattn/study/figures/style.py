"""How series are told apart: by colour, and without any colour by marker, dashes and hatching.

Colours are those of Okabe and Ito, "Color Universal Design" (2008), which people who see colours differently
tell apart; without their yellow, which is too pale for lines on paper. Black is for the library's sum, grey
for the reduction that does nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from treeattn.decoder import plan as routes
from treeattn.study.compare.schema import NULL, SUM

__all__ = ["HATCHES", "MARKERS", "Style", "in_order", "styles"]

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")

#: Of schemes in line charts; of series in rows.
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "*")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (1.2, 1.2)))

#: Of series in bar charts: the first is filled.
HATCHES = (None, "/////", "xxxxx", ".....")


@dataclass(frozen=True, slots=True)
class Style:
    """Colour, marker and dashes as matplotlib takes them."""

    colour: str
    marker: str
    dashes: Any


_FIXED = {SUM: Style("#000000", "h", (0, (1.2, 1.2))), NULL: Style("#7f7f7f", "d", (0, (1.2, 1.2)))}


def styles(names: Iterable[str]) -> dict[str, Style]:
    """One style for each name. Colours return after 6 names, the pair of marker and dashes after 44."""
    plain = [name for name in dict.fromkeys(names) if name not in _FIXED]
    return _FIXED | {
        name: Style(_COLOURS[i % 6], MARKERS[i % len(MARKERS)], _DASHES[i % 4])
        for i, name in enumerate(plain)
    }


def in_order(schemes: Iterable[str]) -> list[str]:
    """Each scheme once, in the order of the catalogue; then others; sum and null last."""
    place = {name: index for index, name in enumerate(routes.CATALOG)}
    place |= {SUM: len(place) + 1, NULL: len(place) + 2}

    def key(scheme: str) -> tuple[int, str]:
        return place.get(scheme.partition(":")[0], len(routes.CATALOG)), scheme

    return sorted(set(schemes), key=key)
