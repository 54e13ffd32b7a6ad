"""A simulated step as an SVG over time: ranks are lanes, bars what they do, lines are messages under way, and
the critical path is what made it take so long."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape
from itertools import accumulate

from treeattn.collectives.clusters.critical_path import critical_path
from treeattn.collectives.clusters.placement import node_groups
from treeattn.collectives.clusters.simulate import MessageEvent, Simulation
from treeattn.collectives.drawings.svg import CRITICAL, page, svg
from treeattn.errors import RestrictionError

RANK_LIMIT = 128
MESSAGE_LIMIT = 5_000
_LEFT, _TOP, _WIDTH, _LANE, _GAP = 96, 74, 900, 12, 8
_LEGEND = (
    "grey: the call; orange: sends; blue: receives and merges; hatched: waits; lines: messages, heavy "
    "between nodes; green: the critical path"
)

# Sending is drawn as a copy is and receiving as a merge is.
_MORE = """.schedule .bar { stroke: none; } .schedule .bar.call { fill: #8d96a0; }
.schedule .bar.send { fill: #d55e00; } .schedule .bar.take { fill: #0072b2; }
.schedule .bar.wait { fill: url(#waiting); } .schedule .hatch { stroke: #8d96a0; stroke-width: 1; }
.schedule .flight { stroke: #5f6771; stroke-width: 0.6; } .schedule .flight.far { stroke-width: 1.3; }
"""
_HATCH = (
    '<defs><pattern id="waiting" width="5" height="5" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><path class="hatch" d="M0,0 V5"/></pattern></defs>'
)


def timeline(simulation: Simulation, span: float | None = None) -> str:
    """A standalone SVG. span: microseconds of its width, for several on one scale; by default the step's own.
    Raises `RestrictionError` for what is too large to be legible."""
    scale = _WIDTH / max(span or simulation.time, 1e-9)
    schedule = simulation.schedule
    if schedule.size > RANK_LIMIT or schedule.messages > MESSAGE_LIMIT:
        raise RestrictionError(
            f"{schedule.name} on {schedule.size} ranks ({schedule.messages} messages) is too large to draw "
            f"over time: at most {RANK_LIMIT} ranks and {MESSAGE_LIMIT} messages"
        )
    nodes = node_groups(simulation.cluster, simulation.places)
    gap = _GAP if len(nodes) > 1 else 0
    places = [(rank, index) for index, node in enumerate(nodes) for rank in node]
    lane = {rank: float(_TOP + at * _LANE + index * gap) for at, (rank, index) in enumerate(places)}
    bottom = max(lane.values()) + _LANE
    where = f"{schedule.size} ranks on {simulation.cluster.name}"
    title = f"{schedule.name}, {where}, simulated: {simulation.time:.1f} µs"
    body = [
        *(_node(index, node, lane) for index, node in enumerate(nodes) if gap),
        *_scale(span or simulation.time, scale, bottom),
        *(part for rank in lane for part in _lane(simulation, rank, lane, scale)),
        *(_flight(simulation, flight, lane, scale) for flight in simulation.flights),
        *_critical(simulation, lane, scale),
    ]
    size = str(_LEFT + _WIDTH + 24), str(bottom + 16)
    return page(size, title, _LEGEND, _MORE + CRITICAL, [_HATCH], body)


def ticks(time: float) -> list[float]:
    """1, 2 or 5 times a power of ten apart, from 0 on: five to eleven of them."""
    power = 10.0 ** math.floor(math.log10(max(time, 1e-9) / 4))
    step = next(power * one for one in (5, 2, 1) if power * one <= max(time, 1e-9) / 4)
    return [float(f"{number * step:.6g}") for number in range(int(time / step + 1e-9) + 1)]


def _node(index: int, node: tuple[int, ...], lane: dict[int, float]) -> str:
    first, last = lane[node[0]], lane[node[-1]]
    return (
        f'<rect class="band" x="12" y="{first - 7:.1f}" width="{_LEFT + _WIDTH}" '
        f'height="{last - first + 14:.1f}" rx="4"/>'
        f'<text class="faint" x="20" y="{(first + last) / 2 + 4:.1f}">node {index}</text>'
    )


def _scale(span: float, scale: float, bottom: float) -> Iterator[str]:
    for time in ticks(span):
        x = _LEFT + scale * time
        yield f'<path class="lane" d="M{x:.1f},{_TOP - 12} V{bottom:.1f}"/>'
        yield f'<text class="faint" x="{x:.1f}" y="{_TOP - 16}" text-anchor="middle">{time:g} µs</text>'


def _lane(simulation: Simulation, rank: int, lane: dict[int, float], scale: float) -> Iterator[str]:
    y, start = lane[rank], simulation.starts[rank]
    yield f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{rank}</text>'
    done = [("call", start, start + simulation.prices.call, "call")]
    for step in simulation.steps[rank]:
        to = ", ".join(str(flight.dst) for flight in step.sends) or "nobody"
        done.append(("send", step.entered, step.sent, f"round {step.round + 1}: to {to}"))
    for flight in simulation.flights:
        if flight.dst == rank:
            about = f"round {flight.round + 1}: from {flight.src}, {flight.bytes} bytes"
            done.append(("take", flight.recv_start, flight.recv_done, about))
    for kind, begun, ended, about in sorted(done, key=lambda bar: bar[1:3]):
        if begun > start:
            yield _bar("wait", start, begun, y, scale, "waits")
        if ended > begun and simulation.steps[rank]:
            yield _bar(kind, begun, ended, y, scale, about)
        start = max(start, ended)


def _bar(kind: str, start: float, end: float, y: float, scale: float, about: str) -> str:
    x, width = _LEFT + scale * start, scale * (end - start)
    return (
        f'<rect class="bar {kind}" x="{x:.1f}" y="{y - 4:.1f}" width="{max(width, 0.4):.1f}" height="8">'
        f"<title>{escape(about)}</title></rect>"
    )


def _flight(simulation: Simulation, flight: MessageEvent, lane: dict[int, float], scale: float) -> str:
    far = " far" if flight.tier > simulation.cluster.node_tier else ""
    start, end = _LEFT + scale * flight.began, _LEFT + scale * flight.delivered
    way = f"M{start:.1f},{lane[flight.src]:.1f} L{end:.1f},{lane[flight.dst]:.1f}"
    return f'<path class="flight{far}" d="{way}"/>'


def _critical(simulation: Simulation, lane: dict[int, float], scale: float) -> Iterator[str]:
    """Along the lanes of the ranks of the chain, and with its messages from one to the next."""
    path = critical_path(simulation)
    ends = accumulate(segment.microseconds for segment in path)
    points = [
        f"{_LEFT + scale * end:.1f},{lane[one.rank if one.to is None else one.to]:.1f}"
        for one, end in zip(path, ends, strict=True)
        if one.to is None or one.kind == "bytes"  # which a message under way ends with
    ]
    if path:
        yield f'<path class="critical" d="M{_LEFT},{lane[path[0].rank]:.1f} L{" L".join(points)}"/>'


def rounds(simulation: Simulation) -> str:
    """The schedule as `svg` draws it, round by round, with its critical path. Raises as `svg`."""
    critical = {(one.round, one.rank, one.to) for one in critical_path(simulation) if one.to is not None}
    return svg(simulation.schedule, node_groups(simulation.cluster, simulation.places), critical)
