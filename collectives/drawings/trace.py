"""A simulated step as a trace for ui.perfetto.dev (or chrome://tracing): nodes are processes,
ranks are threads.

Format: Trace Event Format of the Chromium project, "X" for what a rank does, "s" and "f" for a message.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from treeattn.collectives.clusters.simulate import MessageEvent, Simulation


def trace(simulation: Simulation) -> str:
    """JSON; times in microseconds as everywhere here."""
    node = [place // simulation.cluster.slots for place in simulation.places]
    events = [*_names(node), *(event for at in _events(simulation) for event in at)]
    for event in events:
        event["pid"] = node[event["tid"]]
    about = {"schedule": simulation.schedule.name, "cluster": simulation.cluster.name}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns", "otherData": about}) + "\n"


def _names(node: list[int]) -> Iterator[dict[str, Any]]:
    for rank, index in enumerate(node):
        yield {"ph": "M", "name": "process_name", "tid": rank, "args": {"name": f"node {index}"}}
        yield {"ph": "M", "name": "thread_name", "tid": rank, "args": {"name": f"rank {rank}"}}


def _events(simulation: Simulation) -> Iterator[list[dict[str, Any]]]:
    for rank, steps in enumerate(simulation.steps):
        for step in steps:
            if step.sent > step.entered:
                to = {"to": [flight.dst for flight in step.sends]}
                yield [_slice(f"round {step.round + 1}: send", rank, step.entered, step.sent, to)]
    for number, flight in enumerate(simulation.flights):
        yield _message(simulation, number, flight)


def _message(simulation: Simulation, number: int, flight: MessageEvent) -> list[dict[str, Any]]:
    tier = simulation.cluster.tiers[flight.tier].name
    facts = {"from": flight.src, "bytes": flight.bytes, "tier": tier}
    does = "merge" if flight.merge else "copy"
    arrow = {"cat": tier, "name": "message", "id": number}
    return [
        _slice(f"round {flight.round + 1}: {does}", flight.dst, flight.recv_start, flight.recv_done, facts),
        {"ph": "s", "tid": flight.src, "ts": flight.ready, **arrow},
        {"ph": "f", "bp": "e", "tid": flight.dst, "ts": flight.recv_start, **arrow},
    ]


def _slice(name: str, rank: int, start: float, end: float, facts: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "X", "name": name, "tid": rank, "ts": start, "dur": end - start, "args": facts}
