"""Why a scheme is faster than another: what each sends, counted, and the sentence that says so."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from treeattn.collectives.parameters import Groups, node_of
from treeattn.collectives.schedule import Schedule

Tiers = dict[str, int | None]

_COUNTED = {
    "rounds_inter": "rounds between nodes",
    "messages_inter": "messages between nodes",
    "busiest_bytes": "bytes on the busiest link",
    "rounds": "rounds",
    "messages_intra": "messages within nodes",
}


def counts(
    schedule: Schedule, groups: Groups, records: int, record_bytes: int, group: int = 1
) -> dict[str, Any]:
    """What one step of `schedule` sends over `records` records, never cut within `group` of them.

    groups: the ranks of each node. Messages and bytes as `by_tier` has them; ``rounds``, and ``rounds_inter``
    with a message between nodes; ``busiest_bytes``: what the busiest node sends to others or takes from them,
    on one node the busiest rank. ``sends``: equal for schedules whose messages between the same places are.
    """
    sent = list(schedule.traffic(records, group))
    node = node_of(groups)
    end = node if len(groups) > 1 else {rank: rank for rank in node}
    busy: Counter[tuple[str, int]] = Counter()
    for message in sent:
        if end[message.src] != end[message.dst]:
            busy["out", end[message.src]] += message.records * record_bytes
            busy["in", end[message.dst]] += message.records * record_bytes
    return {
        **by_tier(((m.src, m.dst, m.records * record_bytes) for m in sent), groups),
        "rounds": len({m.round for m in sent}),
        "rounds_inter": len({m.round for m in sent if node[m.src] != node[m.dst]}),
        "busiest_bytes": max(busy.values(), default=0),
        "sends": hashlib.sha256(repr((groups, sorted(map(tuple, sent)))).encode()).hexdigest()[:16],
    }


def by_tier(sent: Iterable[tuple[int, int, int]], groups: Groups) -> Tiers:
    """Messages and bytes within nodes (intra) and between them (inter). sent: source, destination, bytes."""
    node = node_of(groups)
    tiers = dict.fromkeys(("messages_intra", "bytes_intra", "messages_inter", "bytes_inter"), 0)
    for src, dst, size in sent:
        tier = "intra" if node[src] == node[dst] else "inter"
        tiers[f"messages_{tier}"] += 1
        tiers[f"bytes_{tier}"] += size
    return dict(tiers)


def headline(fastest: str, number: str, rows: Sequence[Mapping[str, Any]], scattered: bool = False) -> str:
    """Which scheme is fastest, from which others it cannot be told apart, and what it sends less of than the
    next one.

    fastest, number: its name, and its time or ratio in words. scattered: whether each rank ends with its own
    heads alone, half of what others do. rows: the fastest first, each with ``label``, ``like_fastest`` (None:
    not tested) and, where it has a schedule, its `counts`.
    """
    first, *others = rows
    alike = [row["label"] for row in others if row["like_fastest"]]
    apart = [row for row in others if row["like_fastest"] is False and row.get("sends")]
    said = f"fastest here: {fastest}{' (each rank ends with its heads alone)' * scattered}, {number}"
    if alike:
        said += f"; cannot be told apart from {', '.join(alike)}"
    if untold := [row["label"] for row in others if row["like_fastest"] is None]:
        said += f"; too few blocks to tell it from {', '.join(untold)}"
    return f"{said}; {_because(first, apart[0])}" if apart and first.get("sends") else said


def _because(first: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    less = [name for name in _COUNTED if first[name] < other[name]]
    if not less:
        return f"not for what it sends: {other['label']} has no more rounds, nor more between nodes"
    both = [f"{_COUNTED[name]} {first[name]:,.0f} ({other[name]:,.0f})" for name in less]
    return f"because, {other['label']} in brackets: {', '.join(both)}"


def equal_messages(rows: Iterable[Mapping[str, Any]]) -> str | None:
    """Which schemes among them send the same messages, in words."""
    labels: dict[str, list[str]] = {}
    for row in rows:
        if row.get("sends"):
            labels.setdefault(row["sends"], []).append(row["label"])
    same = [" = ".join(names) for names in labels.values() if len(names) > 1]
    return f"the same messages: {'; '.join(same)}" if same else None
