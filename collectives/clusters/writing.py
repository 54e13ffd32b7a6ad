"""A cluster as the TOML that `description.load` reads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from msgspec import structs

from treeattn.collectives.clusters.description import Cluster

_DIGITS = 6


def as_toml(cluster: Cluster, comments: Iterable[str] = ()) -> str:
    """The file, `comments` above it line by line. Numbers keep six digits; defaults are left out."""
    lines = [f"# {line}".rstrip() for line in comments]
    lines += _table(cluster)
    for tier in cluster.tiers:
        lines += ["", "[[tiers]]", *_table(tier)]
    for name, executor in cluster.executors.items():
        lines += ["", f"[executors.{name}]", *_table(executor)]
    if cluster.correlations:
        lines += ["", "[correlations]"]
        lines += [f"{json.dumps(name)} = {_value(others)}" for name, others in cluster.correlations.items()]
    return "\n".join(lines) + "\n"


def _table(data: msgspec.Struct) -> Iterator[str]:
    """A line for each field that is no table and not its default."""
    for field in structs.fields(data):
        value = getattr(data, field.name)
        apart = field.name in ("tiers", "executors", "correlations")
        if not apart and value not in (field.default, {}):
            yield f"{field.name} = {_value(value)}"


def _value(value: Any) -> str:
    """Strings and truth values are spelled as in JSON."""
    if isinstance(value, float):
        return repr(float(f"{value:.{_DIGITS}g}"))
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {_value(item)}" for key, item in value.items()) + " }"
    if isinstance(value, msgspec.Struct):
        return "{ " + ", ".join(_table(value)) + " }"
    if isinstance(value, tuple):
        return "[\n" + "".join(f"    {_value(item)},\n" for item in value) + "]"
    return json.dumps(value, ensure_ascii=False)
