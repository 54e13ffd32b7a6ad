"""The parameters of schemes: how a value is read from text or Python, checked, and written back."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Literal, SupportsIndex, TypeAlias

from treeattn.errors import RestrictionError, ScheduleError

Kind = Literal["integer", "integers", "choice", "scheme", "tree", "nodes"]

# A plan is an object with an entry per transfer; nesting deeper than any machine has tiers is a mistake.
RANK_LIMIT = 2**18
NESTING_LIMIT = 8

#: The ranks of each node.
Groups: TypeAlias = tuple[tuple[int, ...], ...]

#: A parameter's value in its one form; of kind "nodes" a tuple of sizes, or the ranks of each node.
Value: TypeAlias = int | str | tuple[int, ...] | Groups | None


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a scheme.

    kind: ``"integer"`` and ``"integers"`` (``4+4+2``) are at least `low`; ``"choice"`` is one of
    `choices`; ``"scheme"`` names a schedule that leaves its result on every rank and ``"tree"`` one that
    gathers at rank 0 and copies back; ``"nodes"`` is a list of node sizes, or of the ranks of each node.
    """

    name: str
    kind: Kind
    default: Value
    doc: str
    low: int = 1
    choices: tuple[str, ...] = ()

    @property
    def allowed(self) -> str:
        """The legal values in words."""
        return _KINDS[self.kind][1].format(low=self.low, choices=" or ".join(self.choices))


def read(scheme: str, parameter: Parameter, value: object) -> Value:
    """The value in its one form. Raises `ScheduleError` for text or a Python value outside what the parameter
    allows."""
    try:
        return _KINDS[parameter.kind][0](parameter, value)
    except (TypeError, ValueError) as error:
        raise ScheduleError(
            f"{scheme}: {parameter.name}={value!s:.80} is not allowed; {parameter.name} ({parameter.doc}) "
            f"takes {parameter.allowed}"
        ) from error


def write(parameter: Parameter, value: Value) -> str | None:
    """The text that reads back as `value`; None if only Python can say it (scattered nodes)."""
    if isinstance(value, tuple):
        sizes = [size for size in value if isinstance(size, int)]
        return "+".join(_runs(sizes) if parameter.kind == "nodes" else map(str, sizes)) if sizes else None
    text = str(value)
    return f"({text})" if ":" in text else text


def groups(scheme: str, nodes: Sequence[int] | Sequence[Sequence[int]] | None, size: int) -> Groups:
    """The ranks of each node; without `nodes`, one node holds all ranks.

    Raises `RestrictionError` if they do not hold each rank below `size` exactly once.
    """
    if nodes is None:
        return (tuple(range(size)),)
    sizes = [count for count in nodes if isinstance(count, int)]
    if not sizes:
        ranks = tuple(tuple(node) for node in nodes if not isinstance(node, int))
        if sorted(rank for node in ranks for rank in node) != list(range(size)):
            raise RestrictionError(f"{scheme}: the nodes must hold each of the ranks 0 to {size - 1} once")
        return ranks
    if sum(sizes) != size:
        text = "+".join(_runs(sizes))
        raise RestrictionError(f"{scheme}: nodes={text} hold {sum(sizes)} ranks, but there are {size}")
    ends = accumulate(sizes)
    return tuple(tuple(range(end - count, end)) for count, end in zip(sizes, ends, strict=True))


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
        raise ScheduleError(f"{scheme!r:.80}: the parentheses do not match")
    return parts


def _integer(parameter: Parameter, value: object) -> int:
    number = int(value) if isinstance(value, str) else _index(value)
    if number < parameter.low:
        raise ValueError(number)
    return number


def _integers(parameter: Parameter, value: object) -> tuple[int, ...]:
    items = value.split("+") if isinstance(value, str) else _items(value)
    return tuple(_integer(parameter, item) for item in items)


def _choice(parameter: Parameter, value: object) -> str:
    if value not in parameter.choices:
        raise ValueError(value)
    return str(value)


def _scheme(_: Parameter, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    text = value.strip()
    return text[1:-1] if text.startswith("(") and text.endswith(")") else text


def _nodes(parameter: Parameter, value: object) -> tuple[int, ...] | Groups:
    if isinstance(value, str):
        return tuple(size for item in value.split("+") for size in _run(parameter, item))
    items = _items(value)
    if not isinstance(items[0], Iterable):
        return _integers(parameter, items)
    nodes = tuple(tuple(map(_index, _items(node))) for node in items)
    # Blocks in rank order have a text form; give them one.
    in_order = [rank for node in nodes for rank in node] == list(range(sum(map(len, nodes))))
    return tuple(map(len, nodes)) if in_order else nodes


def _items(value: object) -> list[object]:
    """What there is at least one of."""
    if not isinstance(value, Iterable):
        raise TypeError(value)
    items = list(value)
    if not items:
        raise ValueError("empty")
    return items


def _index(value: object) -> int:
    if not isinstance(value, SupportsIndex):
        raise TypeError(value)
    return operator.index(value)


def _run(parameter: Parameter, text: str) -> tuple[int, ...]:
    repeated = re.fullmatch(r"(\d{1,7})x(\d+)", text.strip())
    if not repeated:
        return (_integer(parameter, text),)
    return (_integer(parameter, repeated[2]),) * _integer(parameter, repeated[1])


def _runs(sizes: Sequence[int]) -> Iterator[str]:
    for size, run in groupby(sizes):
        count = len(list(run))
        yield from [f"{count}x{size}"] if count > 3 else [str(size)] * count


# Kind -> what reads a value, and the legal ones in words.
_KINDS: dict[Kind, tuple[Callable[[Parameter, object], Value], str]] = {
    "integer": (_integer, "an integer of at least {low}"),
    "integers": (_integers, "integers of at least {low} joined by +"),
    "choice": (_choice, "{choices}"),
    "scheme": (_scheme, "a schedule, in parentheses if it has parameters"),
    "tree": (_scheme, "a rooted schedule, in parentheses if it has parameters"),
    "nodes": (_nodes, "node sizes such as 4+4+2 or 16x8 (16 nodes of 8), or the ranks of each node"),
}
