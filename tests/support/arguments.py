"""Drawn arguments by name, put into the value objects that the verbs take."""

from dataclasses import fields
from typing import Any

import treeattn


def _taken(kind: Any, flat: dict[str, Any]) -> dict[str, Any]:
    return {field.name: flat.pop(field.name) for field in fields(kind) if field.name in flat}


def call(**flat: Any) -> dict[str, Any]:
    """The arguments of `treeattn.decode`, and but for rules and scheme of a step of a `Decoder`."""
    shard = treeattn.Shard(**_taken(treeattn.Shard, flat))
    return {"k": shard} | _shared(flat)


def plan(**flat: Any) -> dict[str, Any]:
    """The arguments of a `treeattn.Decoder`; ``cache_dtype`` is the dtype of its CacheFormat."""
    own = {name: flat.pop(name) for name in ("dtype",) if name in flat}
    if "cache_dtype" in flat:
        flat["dtype"] = flat.pop("cache_dtype")
    cache = _taken(treeattn.CacheFormat, flat)
    return own | ({"cache": treeattn.CacheFormat(**cache)} if cache else {}) | _shared(flat)


def _shared(flat: dict[str, Any]) -> dict[str, Any]:
    rules, how = _taken(treeattn.Rules, flat), _taken(treeattn.Reduction, flat)
    made = {"rules": treeattn.Rules(**rules)} if rules else {}
    return flat | made | ({"scheme": treeattn.Reduction(**how)} if how else {})
