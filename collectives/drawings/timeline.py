"""A simulated step as an SVG over time: ranks are lanes, bars what they do, lines are messages under way."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from treeattn.collectives.clusters.placement import node_groups
from treeattn.collectives.clusters.simulate import MessageEvent, Simulation
from treeattn.collectives.drawings.svg import STYLE
from treeattn.errors import RestrictionError

RANK_LIMIT = 128
MESSAGE_LIMIT = 5_000
_LEFT, _TOP, _WIDTH, _LANE = 60, 74, 900, 12
_LEGEND = "orange: sends; blue: receives and merges; lines: messages, heavy between nodes"

# Sending is drawn as a copy is and receiving as a merge is; waiting is the bare lane.
_MORE = """.schedule .bar { stroke: none; }
.schedule .bar.send { fill: #d55e00; } .schedule .bar.take { fill: #0072b2; }
.schedule .flight { stroke: #5f6771; stroke-width: 0.6; } .schedule .flight.far { stroke-width: 1.3; }
"""


def timeline(simulation: Simulation) -> str:
    """A standalone SVG. Raises `RestrictionError` for what is too large to be legible."""
    schedule = simulation.schedule
    if schedule.size > RANK_LIMIT or schedule.messages > MESSAGE_LIMIT:
        raise RestrictionError(
            f"{schedule.name} on {schedule.size} ranks ({schedule.messages} messages) is too large to draw "
            f"over time: at most {RANK_LIMIT} ranks and {MESSAGE_LIMIT} messages"
        )
    order = [rank for node in node_groups(simulation.cluster, simulation.places) for rank in node]
    lane = {rank: float(_TOP + index * _LANE) for index, rank in enumerate(order)}
    bottom = _TOP + len(order) * _LANE
    where = f"{schedule.size} ranks on {simulation.cluster.name}"
    title = f"{schedule.name}, {where}, simulated: {simulation.time:.1f} µs"
    width = _LEFT + _WIDTH + 24
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="schedule" viewBox="0 0 {width} {bottom + 40}" '
            f'width="{width}" height="{bottom + 40}" role="img" aria-label="{escape(title)}">',
            f"<style>{STYLE}{_MORE}</style>",
            f'<rect class="paper" width="{width}" height="{bottom + 40}"/>',
            f'<text class="title" x="16" y="27">{escape(title)}</text>',
            f'<text class="faint" x="16" y="45">{_LEGEND}</text>',
            *_scale(simulation.time, bottom),
            *(part for rank in order for part in _lane(simulation, rank, lane)),
            *(_flight(simulation, flight, lane) for flight in simulation.flights),
            "</svg>\n",
        ]
    )


def _x(simulation: Simulation, time: float) -> float:
    return _LEFT + _WIDTH * time / max(simulation.time, 1e-9)


def _scale(time: float, bottom: float) -> Iterator[str]:
    for part in range(6):
        x = _LEFT + _WIDTH * part / 5
        yield f'<path class="lane" d="M{x:.1f},{_TOP - 12} V{bottom:.1f}"/>'
        at = f"{time * part / 5:.3g} µs"
        yield f'<text class="faint" x="{x:.1f}" y="{_TOP - 16}" text-anchor="middle">{at}</text>'


def _lane(simulation: Simulation, rank: int, lane: dict[int, float]) -> Iterator[str]:
    y = lane[rank]
    yield f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{rank}</text>'
    end = _x(simulation, simulation.ends[rank])
    yield f'<path class="lane" d="M{_LEFT},{y:.1f} H{end:.1f}"/>'
    for step in simulation.steps[rank]:
        if step.sent > step.entered:
            to = ", ".join(str(flight.dst) for flight in step.sends) or "nobody"
            yield _bar(simulation, "send", step.entered, step.sent, y, f"round {step.round + 1}: to {to}")
    for flight in simulation.flights:
        if flight.dst == rank:
            about = f"round {flight.round + 1}: from {flight.src}, {flight.bytes} bytes"
            yield _bar(simulation, "take", flight.recv_start, flight.recv_done, y, about)


def _bar(simulation: Simulation, kind: str, start: float, end: float, y: float, about: str) -> str:
    x, width = _x(simulation, start), _WIDTH * (end - start) / max(simulation.time, 1e-9)
    return (
        f'<rect class="bar {kind}" x="{x:.1f}" y="{y - 4:.1f}" width="{max(width, 0.4):.1f}" height="8">'
        f"<title>{escape(about)}</title></rect>"
    )


def _flight(simulation: Simulation, flight: MessageEvent, lane: dict[int, float]) -> str:
    far = " far" if flight.tier > simulation.cluster.node_tier else ""
    start, end = _x(simulation, flight.began), _x(simulation, flight.delivered)
    way = f"M{start:.1f},{lane[flight.src]:.1f} L{end:.1f},{lane[flight.dst]:.1f}"
    return f'<path class="flight{far}" d="{way}"/>'
