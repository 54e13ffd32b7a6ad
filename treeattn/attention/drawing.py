"""Which tokens of which shard a query sees: a row of a picture for each query and rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from treeattn.attention.mask import Rules
from treeattn.attention.positions import Runs

#: Of a text drawing: a token that the query sees, one of this rank that it does not, and one of others.
SEEN, OWNED, ELSEWHERE = "#", ".", " "

# Blue of Okabe and Ito, "Color Universal Design" (2008), on greys; seen tokens are also the taller ones.
_LIGHT = {"paper": "#ffffff", "ink": "#1b1f24", "owned": "#cfd5dc", "seen": "#0072b2", "query": "#d55e00"}
_DARK = {"paper": "#14171c", "ink": "#e8eaed", "owned": "#3a424c", "seen": "#56b4e9", "query": "#e69f00"}
_STYLE = """
.visible .paper { fill: %(paper)s; } .visible text { fill: %(ink)s; } .visible .owned { fill: %(owned)s; }
.visible .seen { fill: %(seen)s; } .visible .query { stroke: %(query)s; stroke-width: 1.5; }
"""
_LEFT, _TOP, _ROW, _WIDTH = 110, 64, 26, 560


class _Row(NamedTuple):
    """One query on one rank. owned: runs of positions; seen: positions."""

    label: str
    position: int
    owned: list[int]
    seen: set[int]


def _rows(rules: Rules, shards: Sequence[Runs], q_positions: Sequence[int]) -> Iterator[_Row]:
    for position in q_positions:
        for rank, runs in enumerate(shards):
            owned = runs.positions().tolist()
            first, first_end, begin, end = rules.intervals(runs, len(runs), position)
            seen = {*owned[first:first_end], *owned[begin:end]}
            yield _Row(f"query {position}, rank {rank}", position, owned, seen)


def text(rules: Rules, shards: Sequence[Runs], q_positions: Sequence[int]) -> str:
    """A line for each query and rank, a character for each position: ``#`` is seen, ``.`` lies there unseen.

    shards: of each rank. Then the intervals, as kernels get them: indices of the shard.
    """
    rows = list(_rows(rules, shards, q_positions))
    tokens, wide = max((runs.end for runs in shards), default=0), max(len(row.label) for row in rows)
    lines = []
    for index, row in enumerate(rows):
        cells = [ELSEWHERE] * tokens
        for position in row.owned:
            cells[position] = SEEN if position in row.seen else OWNED
        runs = shards[index % len(shards)]
        first, first_end, begin, end = rules.intervals(runs, len(runs), row.position)
        named = [f"{a}..{b}" for a, b in ((first, first_end), (begin, end)) if a < b]
        lines.append(f"{row.label:{wide}} |{''.join(cells)}| {' and '.join(named) or 'nothing'}")
    return "\n".join(lines)


def svg(rules: Rules, shards: Sequence[Runs], q_positions: Sequence[int], title: str) -> str:
    """The same as an SVG: a lane for each query and rank, whose seen tokens stand out."""
    rows = list(_rows(rules, shards, q_positions))
    tokens = max((runs.end for runs in shards), default=0) or 1
    cell, height = _WIDTH / tokens, _TOP + _ROW * len(rows) + 16
    size = f"0 0 {_LEFT + _WIDTH + 20} {height}"
    dark = f"@media screen and (prefers-color-scheme: dark) {{{_STYLE % _DARK}}}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="visible" viewBox="{size}" '
        'font-family="system-ui, sans-serif" font-size="11">',
        f"<style>{_STYLE % _LIGHT}{dark}</style>",
        '<rect class="paper" width="100%" height="100%"/>',
        f'<text x="12" y="24" font-size="15">{escape(title)}</text>',
        f'<text x="12" y="46">{escape(_legend(rules, tokens))}</text>',
    ]
    for index, row in enumerate(rows):
        parts += _lane(row, _TOP + index * _ROW, cell)
    return "\n".join([*parts, "</svg>"])


def _legend(rules: Rules, tokens: int) -> str:
    return (
        f"positions 0 to {tokens - 1}; tall: seen; line: the query; rules: {', '.join(rules.names) or 'none'}"
    )


def _lane(row: _Row, top: int, cell: float) -> Iterator[str]:
    yield f'<text x="12" y="{top + 14}">{escape(row.label)}</text>'
    for kind, chosen, inset in (("owned", row.owned, 6), ("seen", sorted(row.seen), 1)):
        for begin, end in _stretches(chosen):
            yield (
                f'<rect class="{kind}" x="{_LEFT + begin * cell:.1f}" y="{top + inset}" '
                f'width="{(end - begin) * cell:.1f}" height="{20 - 2 * inset}"/>'
            )
    x = _LEFT + (row.position + 0.5) * cell
    yield f'<line class="query" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 2}" y2="{top + 22}"/>'


def _stretches(positions: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(begin, end) of neighbours."""
    begin = previous = None
    for position in positions:
        if previous is not None and begin is not None and position != previous + 1:
            yield begin, previous + 1
            begin = position
        begin = position if begin is None else begin
        previous = position
    if begin is not None and previous is not None:
        yield begin, previous + 1
