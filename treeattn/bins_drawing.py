"""A picture of numbers that are cut at the places of `treeattn.bins`, and of what two bins keep of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from treeattn.bins import STEP

_LIGHT = {"paper": "#ffffff", "ink": "#1b1f24", "upper": "#0072b2", "lower": "#56b4e9", "gone": "#cfd5dc"}
_DARK = {"paper": "#14171c", "ink": "#e8eaed", "upper": "#56b4e9", "lower": "#0072b2", "gone": "#3a424c"}
_STYLE = """
.bins .paper { fill: %(paper)s; } .bins text { fill: %(ink)s; } .bins line { stroke: %(ink)s; }
.bins .upper { fill: %(upper)s; } .bins .lower { fill: %(lower)s; } .bins .gone { fill: %(gone)s; }
"""
_LEFT, _TOP, _ROW, _BIT = 130, 74, 28, 4
_BITS = 48  # of a product of two float32 numbers


def svg(products: Sequence[float], title: str) -> str:
    """A lane for each product: its bits on the number line, those of the upper, the lower and of no bin.

    products: numbers with an exponent in -200 .. 200, none of them 0.
    """
    exponents = [math.frexp(product)[1] for product in products]  # |product| < 2**exponent
    top = max(exponents) // STEP
    high, low = STEP * (top + 1), min(min(exponents) - _BITS, STEP * (top - 1)) - 4
    width, height = _LEFT + (high - low) * _BIT + 20, _TOP + _ROW * len(products) + 12
    dark = f"@media screen and (prefers-color-scheme: dark) {{{_STYLE % _DARK}}}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="bins" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif" font-size="11">',
        f"<style>{_STYLE % _LIGHT}{dark}</style>",
        '<rect class="paper" width="100%" height="100%"/>',
        f'<text x="12" y="22" font-size="15">{escape(title)}</text>',
    ]
    for bin_ in (top + 1, top, top - 1):
        x = _LEFT + (high - STEP * bin_) * _BIT
        parts.append(f'<line x1="{x}" x2="{x}" y1="{_TOP - 14}" y2="{height - 6}" stroke-dasharray="3 3"/>')
        parts.append(f'<text x="{x}" y="{_TOP - 20}" text-anchor="middle">2^{STEP * bin_}</text>')
    names = (("upper bin", top), ("lower bin", top - 1))
    parts += [
        f'<text x="{_LEFT + (high - STEP * bin_) * _BIT - STEP * _BIT // 2}" y="{_TOP - 36}" '
        f'text-anchor="middle">{name}</text>'
        for name, bin_ in names
    ]
    for index, (product, exponent) in enumerate(zip(products, exponents, strict=True)):
        parts += _lane(f"{product:.6g}", exponent, top, high, _TOP + index * _ROW)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _lane(label: str, exponent: int, top: int, high: int, y: int) -> Iterator[str]:
    """Bits exponent - 1 down to exponent - _BITS."""
    yield f'<text x="12" y="{y + 14}">{escape(label)}</text>'
    last = exponent - _BITS
    for kind, begin, end in (
        ("upper", exponent, STEP * top),
        ("lower", min(exponent, STEP * top), STEP * (top - 1)),
        ("gone", min(exponent, STEP * (top - 1)), last),
    ):
        end = max(end, last)
        if begin > end:
            x, width = _LEFT + (high - begin) * _BIT, (begin - end) * _BIT
            yield f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="18"/>'
