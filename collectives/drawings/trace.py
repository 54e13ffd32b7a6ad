"""A step, simulated or measured, as a trace for ui.perfetto.dev (or chrome://tracing): nodes are processes,
ranks are threads.

Format: Trace Event Format of the Chromium project, "X" for what a rank does, "s" and "f" for a message.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from treeattn.collectives.clusters.simulate import Flight, Simulation
from treeattn.collectives.schedule import Message

_DOES = ("start", "wait", "merge")  # between the instants


class Instants(NamedTuple):
    """When a rank began a round, had started its messages, had all that arrive, and had merged them, in
    microseconds."""

    began: float
    started: float
    arrived: float
    merged: float


def trace(simulation: Simulation) -> str:
    """JSON; times in microseconds as everywhere here."""
    node = [place // simulation.cluster.slots for place in simulation.places]
    events = [*_names(node), *(event for at in _events(simulation) for event in at)]
    return _json(events, node, {"schedule": simulation.schedule.name, "cluster": simulation.cluster.name})


def measured(
    name: str, node: Sequence[int], messages: Sequence[Message], ranks: Sequence[Mapping[int, Instants]]
) -> str:
    """The same of what was measured: of each rank, round -> instants on one clock. node: of each rank."""
    events = list(_names(list(node)))
    for rank, rounds in enumerate(ranks):
        for number, at in rounds.items():
            for does, (start, end) in zip(_DOES, pairwise(at), strict=True):
                events.append(_slice(f"round {number + 1}: {does}", rank, start, end, {}))
    for index, message in enumerate(messages):
        sender, receiver = ranks[message.src][message.round], ranks[message.dst][message.round]
        facts = {"cat": "message", "name": f"{message.records} records", "id": index}
        events.append({"ph": "s", "tid": message.src, "ts": sender.began, **facts})
        events.append({"ph": "f", "bp": "e", "tid": message.dst, "ts": receiver.arrived, **facts})
    return _json(events, node, {"schedule": name, "measured": True})


def _json(events: list[dict[str, Any]], node: Sequence[int], about: dict[str, Any]) -> str:
    for event in events:
        event["pid"] = node[event["tid"]]
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


def _message(simulation: Simulation, number: int, flight: Flight) -> list[dict[str, Any]]:
    tier = simulation.cluster.tiers[flight.tier].name
    facts = {"from": flight.src, "bytes": flight.bytes, "tier": tier}
    does = "merge" if flight.merge else "copy"
    arrow = {"cat": tier, "name": "message", "id": number}
    return [
        _slice(f"round {flight.round + 1}: {does}", flight.dst, flight.taken_up, flight.done, facts),
        {"ph": "s", "tid": flight.src, "ts": flight.ready, **arrow},
        {"ph": "f", "bp": "e", "tid": flight.dst, "ts": flight.taken_up, **arrow},
    ]


def _slice(name: str, rank: int, start: float, end: float, facts: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "X", "name": name, "tid": rank, "ts": start, "dur": end - start, "args": facts}
