"""Every scheme with several values of every parameter, derived from the catalogue.

A row added to the catalogue is tested by everything that uses these, with no test to edit.
"""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

from treeattn.collectives import Schedule, build
from treeattn.collectives.catalog import CATALOG, Scheme
from treeattn.collectives.parameters import Parameter
from treeattn.errors import RestrictionError

SIZES = range(1, 34)


def blocks(per_node: int, size: int) -> tuple[tuple[int, ...], ...]:
    """Ranks of nodes of `per_node` ranks, the last one possibly smaller."""
    return tuple(tuple(range(first, min(first + per_node, size))) for first in range(0, size, per_node))


def cyclic(count: int, size: int) -> tuple[tuple[int, ...], ...]:
    """Rank r on node r modulo `count`."""
    return tuple(tuple(range(first, size, count)) for first in range(min(count, size)))


def placements(size: int) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Even, uneven, one-rank and scattered nodes."""
    return {
        "one rank per node": blocks(1, size),
        "blocks of 4": blocks(4, size),
        "one rank, then blocks of 8": ((0,), *(tuple(r + 1 for r in node) for node in blocks(8, size - 1))),
        "cyclic over 3": cyclic(3, size),
    }


def _values(row: Scheme, parameter: Parameter) -> list[Any]:
    if parameter.kind == "integer":
        return [parameter.low, parameter.low + 1, parameter.low + 3]
    if parameter.kind == "choice":
        return list(parameter.choices)
    if parameter.kind == "tree":
        return [other.name for other in CATALOG.values() if other.rooted]
    if parameter.kind == "scheme":
        return [other.name for other in CATALOG.values() if other.kind == "schedule" and other is not row]
    if parameter.kind == "nodes":
        return list(placements(4))
    if parameter.kind == "integers":
        return [(parameter.low,), (parameter.low, parameter.low + 1), (parameter.low + 1, parameter.low)]
    return [parameter.default]


def _variants() -> Iterator[tuple[str, dict[str, Any]]]:
    for row in CATALOG.values():
        if row.kind != "schedule":
            continue
        yield row.name, {}
        on_nodes = row.parameter("nodes") is not None
        for parameter in row.parameters:
            for value in _values(row, parameter):
                if not (on_nodes and parameter.kind == "scheme"):  # over one node it has nothing to do
                    yield row.name, {parameter.name: value}
                if on_nodes and parameter.kind != "nodes":
                    yield row.name, {parameter.name: value, "nodes": "blocks of 4"}


VARIANTS = list(_variants())


def label(variant: tuple[str, dict[str, Any]]) -> str:
    """The variant as a test id."""
    name, params = variant
    return ":".join([name, *(f"{key}={value}" for key, value in params.items())])


def at_size(params: dict[str, Any], size: int) -> dict[str, Any]:
    """Parameters for `build`: the name of a placement becomes its nodes."""
    return {key: placements(size)[value] if key == "nodes" else value for key, value in params.items()}


def served(variant: tuple[str, dict[str, Any]]) -> Iterator[Schedule]:
    """The variant on every number of ranks that it serves; who declares no restriction serves all."""
    name, params = variant
    for size in SIZES:
        try:
            yield build(name, size, **at_size(params, size))
        except RestrictionError:
            assert CATALOG[name].restriction != "none", f"{name} refuses {size} ranks"


def digest(made: Iterable[Schedule]) -> str:
    """Of all that these schedules say: tests/golden/schedules.sha256 holds it for every variant."""
    return hashlib.sha256("\n".join(schedule.to_json() for schedule in made).encode()).hexdigest()


def built(variant: tuple[str, dict[str, Any]], size: int) -> Schedule:
    """Of these parameters, or of none where they do not serve so many ranks."""
    name, params = variant
    try:
        return build(name, size, **at_size(params, size))
    except RestrictionError:
        return build(name, size)
