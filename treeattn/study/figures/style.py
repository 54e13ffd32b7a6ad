"""How a scheme looks: one colour and one marker, the same in every figure and whatever else is drawn.

Both follow from its place in the catalogue. Colours are those of Okabe and Ito, "Color Universal Design"
(2008), which people who see colours differently tell apart, without their yellow, which is too pale for
lines on paper; the pair of colour and marker is unique. Greys are for the library's sum and for the
reduction that does nothing, ink for everything that is no scheme.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from treeattn.selection import CATALOG
from treeattn.study.compare.schema import NCCL_SUM, NULL, SUM

#: Of text and lines, and of what is below them. DARK: (ink, paper) where the reader's screen is dark.
INK, PAPER = "#1b1f24", "#ffffff"
DARK = ("#e8eaed", "#14171c")

#: Of schemes, and of curves in this order.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")

#: Of schemes, or of the series of a figure that has several for each scheme.
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "*")

#: Of schedules of one's own, by the digest in their names.
OWN_MARKERS = ("+", "x", "1", "2", "3", "4")

_OWN = re.compile("@[0-9a-f]{6}$")


class Style(NamedTuple):
    """Colour and marker as matplotlib takes them."""

    colour: str
    marker: str


_PLACES = {name: place for place, name in enumerate(CATALOG)}
_NEUTRAL = {name: Style("#767676", "h") for name in (SUM, NCCL_SUM)} | {NULL: Style("#a0a0a0", "d")}


def style(name: str) -> Style:
    """Of a scheme, whatever its parameters and transport; its label tells those apart."""
    scheme = name.partition(" [")[0]
    if _OWN.search(scheme):
        number = int(scheme[-6:], 16)
        return Style(COLOURS[number % len(COLOURS)], OWN_MARKERS[number // len(COLOURS) % len(OWN_MARKERS)])
    place = _PLACES.get(scheme.partition(":")[0])
    if place is None:
        return _NEUTRAL.get(scheme, Style(INK, "o"))
    return Style(COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)])


def in_order(schemes: Iterable[str]) -> list[str]:
    """Each scheme once, in the order of the catalogue; then others; the library's sum and null last."""
    places = _PLACES | dict.fromkeys((SUM, NCCL_SUM), len(_PLACES) + 1) | {NULL: len(_PLACES) + 2}

    def place(name: str) -> tuple[int, str]:
        return places.get(name.partition(" [")[0].partition(":")[0], len(_PLACES)), name

    return sorted(set(schemes), key=place)
