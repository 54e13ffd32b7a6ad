"""Trees as text and as SVG."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from treeattn.errors import ArgumentError
from treeattn.token_tree import TokenTree
from treeattn.token_tree.drawing import NODE_LIMIT

TREE = TokenTree.from_beams([[[7, 1, 2], [7, 3, 2], [7, 1, 4]], [[9, 9, 9]] * 3])


def test_text_shows_slots_and_who_sees_whom():
    assert TREE.text() == (
        "slot  sees    tree\n"
        "   0  #.....  7\n"
        "   1  +#....  ├─ 1\n"
        "   2  ++#...  │  ├─ 2\n"
        "   5  ++...#  │  └─ 4\n"
        "   3  +..#..  └─ 3\n"
        "   4  +..+#.     └─ 2\n"
    )
    assert TREE.text(1) == "slot  sees  tree\n   0  #..   9\n   1  +#.   └─ 9\n   2  ++#      └─ 9\n"


def test_svg_has_a_word_for_each_node_and_a_square_for_each_pair():
    drawn = TREE.svg(0, lambda token: f"<{token}>")
    root = ElementTree.fromstring(drawn)
    texts = ["".join(element.itertext()) for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert [t for t in texts if t.startswith("<")] == ["<7>", "<1>", "<2>", "<4>", "<3>", "<2>"]
    kinds = [e.get("class") for e in root.iter("{http://www.w3.org/2000/svg}rect")][1:]
    wanted = np.where(np.eye(6, dtype=bool), "itself", np.where(TREE.mask[0], "sees", "hidden"))
    assert kinds == wanted.ravel().tolist()
    assert len(list(root.iter("{http://www.w3.org/2000/svg}path"))) == 5
    assert "prefers-color-scheme" in drawn


def test_what_cannot_be_drawn():
    many = TokenTree.chain(np.zeros((1, NODE_LIMIT + 1), int))
    for draw in (many.text, many.svg):
        with pytest.raises(ArgumentError, match="too many to draw"):
            draw()
    with pytest.raises(ArgumentError, match="rows 0 to 1"):
        TREE.text(2)
