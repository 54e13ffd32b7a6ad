"""The picture of two bins in the docs is what the package draws."""

from __future__ import annotations

from pathlib import Path

from treeattn.bins_drawing import svg

PICTURE = Path(__file__).parents[2] / "docs" / "images" / "two-bins.svg"


def test_the_page_shows_what_is_drawn():
    products = [3.25e9, -41.5, 1.7e-6, 2.5e-14]
    assert svg(products, "Products of 48 bits, and what two bins keep of them") == PICTURE.read_text()
