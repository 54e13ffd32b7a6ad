"""A row of a token tree as text and as SVG: the tree, and beside it its attention mask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from html import escape
from typing import TYPE_CHECKING

from treeattn.errors import ArgumentError

if TYPE_CHECKING:
    from treeattn.token_tree.tree import TokenTree

#: The most nodes of a drawing that can be read.
NODE_LIMIT = 256

_COLUMN, _ROW, _CELL, _LEFT, _TOP = 96, 26, 13, 20, 56

_COLOURS = """
.token-tree .paper { fill: %s; } .token-tree text { fill: %s; }
.token-tree .slot { fill: %s; } .token-tree .edge { stroke: %s; }
.token-tree .sees { fill: %s; } .token-tree .itself { fill: %s; }
.token-tree .hidden { fill: %s; }
"""
# Blue and vermilion of Okabe and Ito, "Color Universal Design" (2008).
_LIGHT = _COLOURS % ("#ffffff", "#1b1f24", "#5f6771", "#8a939d", "#0072b2", "#d55e00", "#f0f2f5")
_DARK = _COLOURS % ("#14171c", "#e8eaed", "#9aa3ad", "#6b747e", "#56b4e9", "#e69f00", "#20252c")
_FONTS = 'system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif'
_STYLE = f"""
.token-tree {{ font-family: {_FONTS}; font-size: 12px; }}
.token-tree .title {{ font-size: 15px; font-weight: 600; }} .token-tree .slot {{ font-size: 9px; }}
.token-tree .edge {{ fill: none; stroke-width: 1.3; }}
{_LIGHT}@media screen and (prefers-color-scheme: dark) {{{_DARK}}}
"""


def text(tree: TokenTree, row: int = 0, label: Callable[[int], str] = str) -> str:
    """A line for each node of a row: its slot, what it sees (# itself, + an ancestor), and the tree.

    label: what to write for a token. Raises `ArgumentError` for more than `NODE_LIMIT` nodes.
    """
    nodes = _checked(tree, row)
    lines = [f"slot  {'sees'.ljust(max(nodes, 4))}  tree"]
    for slot, stem in _walk(tree, row):
        seen = tree.mask[row, slot, :nodes]
        sees = "".join("#" if key == slot else ".+"[int(seen[key])] for key in range(nodes))
        lines.append(f"{slot:4}  {sees.ljust(4)}  {stem}{label(int(tree.tokens[row, slot]))}")
    return "\n".join(lines) + "\n"


def svg(tree: TokenTree, row: int = 0, label: Callable[[int], str] = str) -> str:
    """A standalone SVG for screen (light and dark) and print: the tree, and its mask by slots.

    label: what to write for a token. Raises `ArgumentError` for more than `NODE_LIMIT` nodes.
    """
    nodes, depth = _checked(tree, row), 1 + int(tree.depths[row].max(initial=0))
    places = _places(tree, row)
    words = {slot: label(int(tree.tokens[row, slot])) for slot in places}
    column = max([_COLUMN, *(7 * len(word) + 48 for word in words.values())])
    grid, lines = _LEFT + depth * column + 30, 1 + max((line for _, line in places.values()), default=0)
    width = grid + max(nodes * _CELL, 140) + 24
    height = _TOP + max(lines * _ROW, nodes * _CELL) + 34
    title = f"{nodes} node{'s' * (nodes != 1)}, depth {depth}"
    spots = {slot: (_LEFT + deep * column, _TOP + line * _ROW + 14) for slot, (deep, line) in places.items()}
    return "\n".join(
        [
            '<svg xmlns="http://www.w3.org/2000/svg" class="token-tree" '
            f'viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
            f'aria-label="A token tree: {title}">',
            f"<style>{_STYLE}</style>",
            f'<rect class="paper" width="{width}" height="{height}"/>',
            f'<text class="title" x="{_LEFT}" y="27">Token tree: {title}</text>',
            f'<text class="title" x="{grid}" y="27">Who sees whom</text>',
            *_edges(tree, row, spots, words),
            *_labels(spots, words),
            *_mask_squares(tree, row, nodes, grid),
            "</svg>\n",
        ]
    )


def _walk(tree: TokenTree, row: int) -> Iterator[tuple[int, str]]:
    """(slot, the lines that lead to it), parents before children and siblings side by side."""
    waiting = [(int(root), "", "") for root in tree.children(row)[::-1]]
    while waiting:
        slot, stem, below = waiting.pop()
        yield slot, stem
        children = tree.children(row, slot).tolist()
        for child in reversed(children):
            last = child == children[-1]
            waiting.append((child, below + ("└─ " if last else "├─ "), below + ("   " if last else "│  ")))


def _places(tree: TokenTree, row: int) -> dict[int, tuple[int, int]]:
    """(depth, line) of each slot: a first child stands in its parent's line, each other in a new one."""
    places: dict[int, tuple[int, int]] = {}
    lines = 0
    for slot, _ in _walk(tree, row):
        parent = int(tree.parents[row, slot])
        first = parent >= 0 and tree.children(row, parent)[0] == slot
        places[slot] = int(tree.depths[row, slot]), places[parent][1] if first else lines
        lines += not first
    return places


def _edges(
    tree: TokenTree, row: int, spots: dict[int, tuple[int, int]], words: dict[int, str]
) -> Iterator[str]:
    for slot, (x, y) in spots.items():
        if (parent := int(tree.parents[row, slot])) >= 0:
            from_x, from_y = spots[parent]
            start, end = from_x + 7 * len(words[parent]) + 20, x - 5
            bend = f"M{start} {from_y - 4} C{end - 10} {from_y - 4} {start + 6} {y - 4} {end} {y - 4}"
            yield f'<path class="edge" d="{bend}"/>'


def _labels(spots: dict[int, tuple[int, int]], words: dict[int, str]) -> Iterator[str]:
    for slot, (x, y) in spots.items():
        yield f'<text class="slot" x="{x}" y="{y}">{slot}</text>'
        yield f'<text x="{x + 14}" y="{y}">{escape(words[slot])}</text>'


def _mask_squares(tree: TokenTree, row: int, nodes: int, left: int) -> Iterator[str]:
    """A square for each pair: queries down, keys to the right."""
    size = f'width="{_CELL - 1}" height="{_CELL - 1}"'
    for query in range(nodes):
        y = _TOP + query * _CELL
        yield f'<text class="slot" x="{left - 15}" y="{y + 10}">{query}</text>'
        for key in range(nodes):
            seen = "itself" if key == query else "sees" if tree.mask[row, query, key] else "hidden"
            yield f'<rect class="{seen}" x="{left + key * _CELL}" y="{y}" {size}/>'
    y = _TOP + nodes * _CELL + 16
    yield f'<text class="slot" x="{left}" y="{y}">rows: queries, columns: keys</text>'


def _checked(tree: TokenTree, row: int) -> int:
    """The nodes of a row that can be drawn. Raises `ArgumentError`."""
    if not 0 <= row < tree.batch:
        raise ArgumentError(f"row {row}: this tree has rows 0 to {tree.batch - 1}")
    nodes = int(tree.lengths[row])
    if nodes > NODE_LIMIT:
        raise ArgumentError(f"row {row} has {nodes} nodes, too many to draw: at most {NODE_LIMIT}")
    return nodes
