"""The parameters of schemes: how a value is read from text or Python, checked, and written back."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any, Literal

from treeattn.errors import RestrictionError, ScheduleError

__all__ = ["Groups", "Parameter", "groups", "node_of", "read", "split", "write"]

Kind = Literal["integer", "integers", "choice", "scheme", "tree", "nodes"]

# A plan is an object with an entry per transfer; nesting deeper than any machine has tiers is a mistake.
RANK_LIMIT = 2**18
NESTING_LIMIT = 8

# The ranks of each node.
Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a scheme.

    kind: ``"integer"`` and ``"integers"`` (``4+4+2``) are at least `low`; ``"choice"`` is one of
    `choices`; ``"scheme"`` names a schedule that leaves its result on every rank and ``"tree"`` one that
    gathers at rank 0 and copies back; ``"nodes"`` is a list of node sizes, or of the ranks of each node.
    """

    name: str
    kind: Kind
    default: Any
    doc: str
    low: int = 1
    choices: tuple[str, ...] = ()

    @property
    def allowed(self) -> str:
        """The legal values in words."""
        return {
            "integer": f"an integer of at least {self.low}",
            "integers": f"integers of at least {self.low} joined by +",
            "choice": " or ".join(self.choices),
            "scheme": "a schedule, in parentheses if it has parameters",
            "tree": "a rooted schedule, in parentheses if it has parameters",
            "nodes": "node sizes such as 4+4+2 or 16x8 (16 nodes of 8), or the ranks of each node",
        }[self.kind]


def read(scheme: str, parameter: Parameter, value: Any) -> Any:
    """The value in its one form: int, tuple of int, str, or for nodes a tuple of sizes or of ranks.

    Raises `ScheduleError` for text or a Python value outside what the parameter allows.
    """
    try:
        return _READERS[parameter.kind](parameter, value)
    except (TypeError, ValueError) as error:
        raise ScheduleError(
            f"{scheme}: {parameter.name}={value} is not allowed; {parameter.name} ({parameter.doc}) "
            f"takes {parameter.allowed}"
        ) from error


def write(parameter: Parameter, value: Any) -> str | None:
    """The text that reads back as `value`; None if only Python can say it (scattered nodes)."""
    if parameter.kind == "integers":
        return "+".join(map(str, value))
    if parameter.kind == "nodes":
        return None if value and isinstance(value[0], tuple) else "+".join(_runs(value))
    text = str(value)
    return f"({text})" if ":" in text else text


def groups(scheme: str, nodes: Sequence[Any] | None, size: int) -> Groups:
    """The ranks of each node; without `nodes`, one node holds all ranks.

    Raises `RestrictionError` if they do not hold each rank below `size` exactly once.
    """
    if nodes is None:
        return (tuple(range(size)),)
    if isinstance(nodes[0], int):
        if sum(nodes) != size:
            text = "+".join(_runs(nodes))
            raise RestrictionError(f"{scheme}: nodes={text} hold {sum(nodes)} ranks, but there are {size}")
        ends = list(accumulate(nodes))
        return tuple(tuple(range(end - count, end)) for count, end in zip(nodes, ends, strict=True))
    if sorted(rank for node in nodes for rank in node) != list(range(size)):
        raise RestrictionError(f"{scheme}: the nodes must hold each of the ranks 0 to {size - 1} once")
    return tuple(tuple(node) for node in nodes)


def node_of(nodes: Groups) -> dict[int, int]:
    """Rank -> index of its node."""
    return {rank: index for index, ranks in enumerate(nodes) for rank in ranks}


def split(scheme: str) -> list[str]:
    """``a:b=(c:d=1)`` -> ``["a", "b=(c:d=1)"]``: cut at the colons outside parentheses."""
    parts, depth = [""], 0
    if scheme.count("(") > NESTING_LIMIT:
        raise ScheduleError(f"{scheme[:40]!r}..: more than {NESTING_LIMIT} schemes inside one another")
    for character in scheme.strip():
        depth += (character == "(") - (character == ")")
        if depth < 0:
            break
        if character == ":" and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    if depth:
        raise ScheduleError(f"{scheme!r}: the parentheses do not match")
    return parts


def _integer(parameter: Parameter, value: Any) -> int:
    number = int(value) if isinstance(value, str) else operator.index(value)
    if number < parameter.low:
        raise ValueError(number)
    return number


def _integers(parameter: Parameter, value: Any) -> tuple[int, ...]:
    items = value.split("+") if isinstance(value, str) else tuple(value)
    if not items:
        raise ValueError("empty")
    return tuple(_integer(parameter, item) for item in items)


def _choice(parameter: Parameter, value: Any) -> str:
    if value not in parameter.choices:
        raise ValueError(value)
    return str(value)


def _scheme(_: Parameter, value: Any) -> str:
    text: str = value.strip()
    return text[1:-1] if text.startswith("(") and text.endswith(")") else text


def _nodes(parameter: Parameter, value: Any) -> tuple[Any, ...]:
    if isinstance(value, str):
        return tuple(size for item in value.split("+") for size in _run(parameter, item))
    items = tuple(value)
    if not items or not hasattr(items[0], "__iter__"):
        return _integers(parameter, items)
    nodes = tuple(tuple(operator.index(rank) for rank in node) for node in items)
    if not all(nodes):
        raise ValueError("a node without ranks")
    # Blocks in rank order have a text form; give them one.
    in_order = [rank for node in nodes for rank in node] == list(range(sum(map(len, nodes))))
    return tuple(map(len, nodes)) if in_order else nodes


def _run(parameter: Parameter, text: str) -> tuple[int, ...]:
    repeated = re.fullmatch(r"(\d{1,7})x(\d+)", text.strip())
    if not repeated:
        return (_integer(parameter, text),)
    return (_integer(parameter, repeated[2]),) * _integer(parameter, repeated[1])


def _runs(sizes: Sequence[int]) -> Iterator[str]:
    for size, run in groupby(sizes):
        count = len(list(run))
        yield from [f"{count}x{size}"] if count > 3 else [str(size)] * count


_READERS = {
    "integer": _integer,
    "integers": _integers,
    "choice": _choice,
    "scheme": _scheme,
    "tree": _scheme,
    "nodes": _nodes,
}
