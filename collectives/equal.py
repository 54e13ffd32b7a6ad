"""Which scheme of the catalogue a schedule is: one that sends the same messages in the same rounds."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

from treeattn.collectives.catalog import CATALOG, Scheme, build
from treeattn.collectives.parameters import Groups, Parameter, Value
from treeattn.collectives.schedule import Schedule
from treeattn.errors import TreeattnError

_RANKS = 64  # with more, building every scheme takes seconds
_MOST = 8  # of a parameter that is a number


def equal_to(schedule: Schedule, nodes: Groups | None = None) -> str | None:
    """The scheme whose rounds are those of `schedule`, with the fewest parameters; None if there is none, or
    with more than 64 ranks.

    Chunks are compared as parts of the records, whatever their number; the order within a round says nothing.
    Schemes with nodes are tried on `nodes`, without them on all nodes of one size. Numbers are tried up to 8.
    """
    if schedule.size > _RANKS:
        return None
    wanted = _rounds(schedule)
    for _, name, given in sorted(_candidates(schedule.size, nodes), key=lambda found: found[:2]):
        try:
            other = build(name, schedule.size, **given)
        except TreeattnError:  # it does not serve this size, or these parameters
            continue
        if other.result == schedule.result and len(other.rounds) >= len(wanted) and _rounds(other) == wanted:
            return other.name
    return None


def _rounds(schedule: Schedule) -> list[Counter[tuple[object, ...]]]:
    """Rounds as sets of messages."""
    whole = schedule.chunks
    return [
        Counter((t.src, t.dst, t.chunks.start / whole, t.chunks.stop / whole, t.merge) for t in round_)
        for round_ in schedule.rounds
        if round_
    ]


def _candidates(size: int, nodes: Groups | None) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """How many parameters are not the default, the name, and those."""
    for row in CATALOG.values():
        if row.generator is None:
            continue
        values = [_values(parameter, size, nodes) for parameter in row.parameters]
        for chosen in itertools.product(*values):
            given = {
                parameter.name: value
                for parameter, value in zip(row.parameters, chosen, strict=True)
                if value != parameter.default
            }
            yield len(given), row.name, given


def _values(parameter: Parameter, size: int, nodes: Groups | None) -> list[Value]:
    if parameter.kind == "integer":
        return [parameter.default, *range(parameter.low, min(size, _MOST) + 1)]
    if parameter.kind == "choice":
        return [*parameter.choices]
    if parameter.kind == "nodes":
        even = [(part,) * (size // part) for part in range(2, size) if size % part == 0]
        return [nodes] if nodes is not None else [None, *even]
    if parameter.kind in ("scheme", "tree"):
        return [row.name for row in CATALOG.values() if _inner(row, parameter)]
    return [parameter.default]


def _inner(row: Scheme, parameter: Parameter) -> bool:
    plain = row.generator is not None and row.parameter("nodes") is None
    return plain and row.result == "replicated" and (row.rooted or parameter.kind == "scheme")
