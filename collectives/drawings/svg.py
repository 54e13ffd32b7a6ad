"""A schedule as an SVG: ranks are lanes grouped in shaded nodes, rounds are columns, transfers are arrows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from math import hypot
from typing import Any

from treeattn.collectives import parameters
from treeattn.collectives.check import check
from treeattn.collectives.parameters import Groups
from treeattn.collectives.schedule import Round, Schedule, Transfer
from treeattn.errors import RestrictionError

# Beyond these arrows and labels cannot be distinguished.
RANK_LIMIT = 256
MESSAGE_LIMIT = 20_000

# Blue, vermilion, sky blue and orange of Okabe and Ito, "Color Universal Design" (2008): distinct to
# people who see colours differently; merges are also solid and copies dashed, for print in grey.
_LIGHT = {
    "paper": "#ffffff", "ink": "#1b1f24", "faint": "#5f6771", "lane": "#bfc6ce", "band": "#f0f2f5",
    "merge": "#0072b2", "copy": "#d55e00", "done": "#3f474f",
}  # fmt: skip
_DARK = {
    "paper": "#14171c", "ink": "#e8eaed", "faint": "#9aa3ad", "lane": "#4a525c", "band": "#20252c",
    "merge": "#56b4e9", "copy": "#e69f00", "done": "#b6bec7",
}  # fmt: skip

_SHAPES = """
.schedule { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; font-size: 11px; }
.schedule .title { font-size: 15px; font-weight: 600; } .schedule .chunk { font-size: 8.5px; }
.schedule .lane { stroke-width: 1; } .schedule .done { stroke-width: 2.2; }
.schedule .transfer { fill: none; stroke-width: 1.3; } .schedule .far { stroke-width: 2.5; }
.schedule .dense .transfer { stroke-width: 0.5; } .schedule .dense .far { stroke-width: 0.9; }
.schedule .copy { stroke-dasharray: 5 3; } .schedule .copy.far { stroke-dasharray: 7 3.5; }
"""

# Plain rules, no CSS variables: many renderers of SVG files do not know them.
_COLOURS = """
.schedule .paper { fill: %(paper)s; } .schedule .band { fill: %(band)s; } .schedule text { fill: %(ink)s; }
.schedule .faint, .schedule .chunk { fill: %(faint)s; }
.schedule .lane { stroke: %(lane)s; }
.schedule .done { stroke: %(done)s; } .schedule .source { fill: %(done)s; }
.schedule .merge { stroke: %(merge)s; } .schedule .copy { stroke: %(copy)s; }
.schedule .merge-head { fill: %(merge)s; } .schedule .copy-head { fill: %(copy)s; }
"""

CRITICAL = ".schedule .critical { fill: none; stroke: #009e73; stroke-width: 3; stroke-opacity: 0.7; }\n"

STYLE = (
    _SHAPES
    + _COLOURS % _LIGHT
    + "@media screen and (prefers-color-scheme: dark) {"
    + _COLOURS % _DARK
    + "}\n"
)

_LEFT, _TOP, _GAP = 96, 92, 18


@dataclass(frozen=True)
class Drawing:
    """Where everything goes, in pixels."""

    schedule: Schedule
    nodes: Groups
    lanes: dict[int, float]  # rank -> y
    starts: tuple[float, ...]  # x at which the arrows of each round begin
    ends: tuple[float, ...]
    right: float
    bottom: float

    @staticmethod
    def of(schedule: Schedule, nodes: Sequence[Any] | None) -> Drawing:
        """Lay out `schedule`; `nodes` are node sizes or the ranks of each node, by default one node."""
        if schedule.size > RANK_LIMIT or schedule.messages > MESSAGE_LIMIT:
            raise RestrictionError(
                f"{schedule.name} on {schedule.size} ranks ({schedule.messages} messages) is too large to "
                f"draw: at most {RANK_LIMIT} ranks and {MESSAGE_LIMIT} messages; "
                "take the formats text, json or goal"
            )
        grouped = parameters.groups(schedule.name, nodes, schedule.size)
        lanes = dict(_lanes(grouped, 24 if schedule.size <= 16 else 19 if schedule.size <= 64 else 11))
        room = [_GAP + 5 * _label_length(schedule, round_) for round_ in schedule.rounds]
        widths = [_column_width(round_, lanes) for round_ in schedule.rounds]
        ends = list(
            accumulate((gap + width for gap, width in zip(room, widths, strict=True)), initial=_LEFT)
        )[1:]
        starts = tuple(end - width for end, width in zip(ends, widths, strict=True))
        right = (ends[-1] if ends else _LEFT) + _GAP
        return Drawing(schedule, grouped, lanes, starts, tuple(ends), right, max(lanes.values()) + 22)


def svg(
    schedule: Schedule, nodes: Sequence[Any] | None = None, critical: Collection[tuple[int, int, int]] = ()
) -> str:
    """A standalone SVG for screen (light and dark) and print.

    `nodes`: node sizes or the ranks of each node; arrows between nodes are heavier. critical: round (from 0),
    sender and receiver of the messages of a critical path. Raises `ScheduleError` for a schedule that does
    not check and `RestrictionError` for too many ranks.
    """
    layout = Drawing.of(schedule, nodes)
    title, facts = headline(schedule, layout.nodes)
    items = _legend_items(layout) + ([("critical", "critical path", 130)] if critical else [])
    needed = [24 + 9 * len(title), 24 + 7 * len(facts), 30 + sum(item_width for *_, item_width in items)]
    size = f"{max(layout.right + 8, *needed):.0f}", f"{layout.bottom + 40:.0f}"
    body = [*draw_lanes(layout), *draw_rounds(layout, critical), *_legend(items, layout.bottom + 22)]
    return page(size, title, facts, CRITICAL if critical else "", _heads(), body)


def page(
    size: tuple[str, str], title: str, facts: str, style: str, defs: Iterable[str], body: Iterable[str]
) -> str:
    """A standalone file of a drawing of that width and height. style, defs: what it has besides `STYLE`."""
    width, height = size
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="schedule" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" aria-label="{escape(title)}">',
            f"<style>{STYLE}{style}</style>",
            *defs,
            f'<rect class="paper" width="{width}" height="{height}"/>',
            f'<text class="title" x="16" y="27">{escape(title)}</text>',
            f'<text class="faint" x="16" y="45">{escape(facts)}</text>',
            *body,
            "</svg>\n",
        ]
    )


def headline(schedule: Schedule, nodes: Groups) -> tuple[str, str]:
    """Title and facts of a drawing, one line each."""
    known = check(schedule)
    where = f" on {len(nodes)} nodes" if len(nodes) > 1 else ""
    facts = [_count(known.rounds, "round"), f"depth {known.depth}", _count(known.messages, "message")]
    if len(nodes) > 1:
        node = parameters.node_of(nodes)
        between = sum(node[t.src] != node[t.dst] for round_ in schedule.rounds for t in round_)
        facts[-1] += f" ({between} between nodes)"
    if schedule.chunks > 1:
        facts.append(_count(schedule.chunks, "chunk"))
    if schedule.result == "root":
        facts.append("to rank 0")
    return f"{schedule.name}, {_count(schedule.size, 'rank')}{where}", " · ".join(
        [*facts, f"class {known.determinism}"]
    )


def last_arrivals(schedule: Schedule) -> list[int]:
    """Per rank, the round of the last transfer into it (0: none): from there on its result stands."""
    last = [0] * schedule.size
    for number, round_ in enumerate(schedule.rounds, 1):
        for transfer in round_:
            last[transfer.dst] = number
    return last


def _heads() -> Iterator[str]:
    yield "<defs>"
    for kind in ("merge", "copy"):
        yield (
            f'<marker id="{kind}-head" class="{kind}-head" viewBox="0 0 8 8" refX="1" refY="4" '
            'markerUnits="userSpaceOnUse" markerWidth="8.5" markerHeight="8.5" orient="auto">'
            '<path d="M0,0.6 L8,4 L0,7.4 z"/></marker>'
        )
    yield "</defs>"


def draw_lanes(layout: Drawing) -> Iterator[str]:
    """Bands of nodes, round numbers, lanes with rank labels; a lane is strong once its result stands."""
    for index, node in enumerate(layout.nodes):
        first, last = layout.lanes[node[0]], layout.lanes[node[-1]]
        yield (
            f'<rect class="band" x="12" y="{first - 11:.1f}" width="{layout.right - 12:.1f}" '
            f'height="{last - first + 22:.1f}" rx="6"/>'
        )
        if len(layout.nodes) > 1:
            yield f'<text class="faint" x="20" y="{(first + last) / 2 + 4:.1f}">node {index}</text>'
    yield f'<text class="faint" x="{_LEFT - 8}" y="{_TOP - 16}" text-anchor="end">round</text>'
    for number, (start, end) in enumerate(zip(layout.starts, layout.ends, strict=True), 1):
        middle = (start + end) / 2
        yield f'<text class="faint" x="{middle:.1f}" y="{_TOP - 16}" text-anchor="middle">{number}</text>'
    final = last_arrivals(layout.schedule)
    for rank, y in layout.lanes.items():
        stands = layout.ends[final[rank] - 1] if final[rank] else float(_LEFT)
        yield f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{rank}</text>'
        lane = f"{y:.1f} H{layout.right - 6:.1f}"
        yield f'<path class="lane" d="M{_LEFT},{lane}"/>'
        if layout.schedule.promised(rank):
            yield f'<path class="done" data-round="{final[rank]}" d="M{stands:.1f},{lane}"/>'


def draw_rounds(layout: Drawing, critical: Collection[tuple[int, int, int]] = ()) -> Iterator[str]:
    """One group of arrows per round."""
    node = parameters.node_of(layout.nodes)
    for index, round_ in enumerate(layout.schedule.rounds):
        dense = " dense" if len(round_) > 6 * layout.schedule.size else ""
        yield f'<g class="round{dense}" data-round="{index + 1}">'
        for transfer in round_:
            mark = " far" if node[transfer.src] != node[transfer.dst] else ""
            mark += " critical" if (index, transfer.src, transfer.dst) in critical else ""
            yield _arrow(layout, index, transfer, mark)
        for src in sorted({transfer.src for transfer in round_}):
            x, y = layout.starts[index], layout.lanes[src]
            yield f'<circle class="source" cx="{x:.1f}" cy="{y:.1f}" r="2.2"/>'
        if _label_length(layout.schedule, round_):
            yield from (_chunk_label(layout, index, transfer) for transfer in round_)
        yield "</g>"


def _arrow(layout: Drawing, index: int, transfer: Transfer, mark: str) -> str:
    kind = "merge" if transfer.merge else "copy"
    several = "s" * (len(transfer.chunks) > 1)
    carried = f", chunk{several} {chunk_range(transfer.chunks)}" if layout.schedule.chunks > 1 else ""
    x, y = layout.starts[index], layout.lanes[transfer.src]
    across, down = layout.ends[index] - x, layout.lanes[transfer.dst] - y
    short = 1 - 7.5 / hypot(across, down)  # the head covers the rest
    return (
        f'<path class="transfer {kind}{mark}" marker-end="url(#{kind}-head)" '
        f'd="M{x:.1f},{y:.1f} L{x + short * across:.1f},{y + short * down:.1f}">'
        f"<title>round {index + 1}: {escape(transfer.arrow)}{carried}</title></path>"
    )


def _chunk_label(layout: Drawing, index: int, transfer: Transfer) -> str:
    x, y = layout.starts[index] - 3, layout.lanes[transfer.src] - 3
    label = chunk_range(transfer.chunks)
    return f'<text class="chunk" x="{x:.1f}" y="{y:.1f}" text-anchor="end">{label}</text>'


def chunk_range(chunks: range) -> str:
    """Numbers from the first to the last."""
    return str(chunks.start) if len(chunks) == 1 else f"{chunks.start}-{chunks.stop - 1}"


def _label_length(schedule: Schedule, round_: Round) -> int:
    """Characters of the longest chunk label; 0 where labels say nothing or would lie over each other."""
    if schedule.chunks == 1 or len({t.src for t in round_}) < len(round_):
        return 0
    if all(len(t.chunks) == schedule.chunks for t in round_):
        return 0
    return max(len(chunk_range(t.chunks)) for t in round_)


def _lanes(nodes: Groups, height: float) -> Iterator[tuple[int, float]]:
    y = float(_TOP)
    for node in nodes:
        for rank in node:
            yield rank, y
            y += height
        y += max(0.0, 27 - height) if len(nodes) > 1 else 0.0


def _column_width(round_: Round, lanes: dict[int, float]) -> float:
    """Wider for rounds that reach further or hold more, so that crossing arrows stay apart."""
    reach = sum(abs(lanes[t.src] - lanes[t.dst]) for t in round_) / max(1, len(round_))
    crowd = 8 * max(0.0, len(round_) / len(lanes) - 1)
    return min(170.0, 34 + 0.38 * reach) + min(150.0, crowd)


def _legend_items(layout: Drawing) -> list[tuple[str, str, int]]:
    """(class of the sample line, words, width) of what occurs in the drawing."""
    kinds = {t.merge for round_ in layout.schedule.rounds for t in round_}
    wanted = [
        (True in kinds, "transfer merge", "merge"),
        (False in kinds, "transfer copy", "copy"),
        (len(layout.nodes) > 1 and bool(kinds), "transfer merge far", "heavy: between nodes"),
        (True, "done", "result stands"),
        (
            any(_label_length(layout.schedule, r) for r in layout.schedule.rounds),
            "",
            "small figures: chunks sent",
        ),
    ]
    return [(line, words, 50 + 6 * len(words)) for shown, line, words in wanted if shown]


def _legend(items: list[tuple[str, str, int]], y: float) -> Iterator[str]:
    x = 16.0
    for line, words, width in items:
        kind = next((kind for kind in ("merge", "copy") if kind in line), None)
        head = f' marker-end="url(#{kind}-head)"' if kind else ""
        if line:
            yield f'<path class="{line}"{head} d="M{x:.0f},{y:.1f} h{22 if kind else 28}"/>'
        yield f'<text class="faint" x="{x + (35 if line else 0):.0f}" y="{y + 4:.1f}">{words}</text>'
        x += width


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
