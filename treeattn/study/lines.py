"""What a line of a results file must hold: checked field by field, so that readers meet no surprise.

A file may have been cut, edited, joined or written by another version. A line that passes has every field
that `treeattn.study.results` computes with, in the right type; other fields may be there too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

__all__ = ["FLOOR", "FORMAT", "NULL", "checked"]

#: Of the lines; a reader leaves lines of another format alone and names them.
FORMAT = 1

#: What stands among the schemes in results without being one: its results are not judged.
FLOOR, NULL = "MPI_Allreduce(SUM)", "null"

_MOST = 10**18  # of any number: sums and ratios of such are finite


class _Kind(NamedTuple):
    """words: what a value must be, to follow "not"."""

    words: str
    holds: Callable[[Any], bool]


def _whole(least: int) -> _Kind:
    return _Kind(f"a whole number from {least}", lambda value: type(value) is int and least <= value <= _MOST)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= _MOST


def _is_series(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_number, value))


def _are_samples(value: Any) -> bool:
    if not isinstance(value, dict) or not all(map(_is_series, value.values())):
        return False
    return {"completion", "slowest", "after_last_entry"} <= set(value) and min(value["completion"]) > 0


def _are_tiers(value: Any) -> bool:
    """Tier -> [messages, bytes], messages None where they are not known."""
    if not isinstance(value, dict) or not {"intra", "inter"} <= set(value) <= {"intra", "inter", "unknown"}:
        return False
    return all(
        isinstance(pair, list) and len(pair) == 2 and _PERHAPS_COUNT.holds(pair[0]) and _COUNT.holds(pair[1])
        for pair in value.values()
    )


def _perhaps(kind: _Kind) -> _Kind:
    return _Kind(f"{kind.words} or null", lambda value: value is None or kind.holds(value))


def _one_of(*known: str) -> _Kind:
    return _Kind(f"one of {', '.join(known)}", lambda value: isinstance(value, str) and value in known)


_COUNT, _FROM_1 = _whole(0), _whole(1)
_PERHAPS_COUNT = _perhaps(_COUNT)
_NUMBER = _Kind("a number", _is_number)
_NOT_NEGATIVE = _Kind("a number from 0", lambda value: _is_number(value) and value >= 0)
# JSON has no words for these, so they are spelled as strings.
_ERROR = _Kind("a number", lambda value: _is_number(value) or value in ("nan", "inf"))
_TEXT = _Kind("text", lambda value: isinstance(value, str))
_FLAG = _Kind("true or false", lambda value: isinstance(value, bool))
_OBJECT = _Kind("an object", lambda value: isinstance(value, dict))
_OBJECTS = _Kind(
    "a list of objects", lambda value: isinstance(value, list) and all(map(_OBJECT.holds, value))
)
_NOTHING = _Kind("null", lambda value: value is None)
_SAMPLES = _Kind("series of numbers, with completion above 0", _are_samples)
_TIERS = _Kind("messages and bytes by tier", _are_tiers)

_FORMAT = _Kind(f"{FORMAT}, which this version reads", lambda value: type(value) is int and value == FORMAT)
_EVERY_LINE = {"format": _FORMAT, "run": _TEXT, "kind": _one_of("run", "point", "error")}
_KEY = {
    "what": _one_of("reduce", "decode"), "scheme": _TEXT, "ranks": _FROM_1, "tokens": _COUNT,
    "batch": _FROM_1, "queries": _FROM_1, "heads": _FROM_1, "kv_heads": _FROM_1, "head_dim": _FROM_1,
    "dtype": _TEXT, "wire": _one_of("float32", "bfloat16", "float64"), "skew": _NOT_NEGATIVE,
}  # fmt: skip
_POINT = {
    "key": _OBJECT, "launch": _FROM_1, "repetition": _COUNT, "plan": _NUMBER, "first": _NUMBER,
    "late": _COUNT, "clock_error": _NOT_NEGATIVE, "determinism": _TEXT,
    "rounds": _PERHAPS_COUNT, "depth": _PERHAPS_COUNT, "sent": _perhaps(_TIERS),
    "scheduled": _perhaps(_TIERS), "same_bits": _perhaps(_FLAG), "digest": _perhaps(_TEXT),
    "held": _PERHAPS_COUNT, "step_peak": _PERHAPS_COUNT, "samples": _SAMPLES,
}  # fmt: skip
_ERRORS = ("error_out", "error_lse", "bound_out", "bound_lse")
_OPTIONAL = {"took": _NOT_NEGATIVE, "predicted": _NUMBER}  # not in the files of every version
_RUN = {"software": _OBJECT, "ranks": _OBJECTS}
_SOFTWARE = {"git": _perhaps(_TEXT), "mpi": _TEXT, "packages": _OBJECT}
_RANK = {"node": _COUNT, "cpu": _TEXT}


def checked(line: bytes) -> dict[str, Any]:
    """The fields of a line, errors and bounds as floats.

    Raises `ValueError`, naming the field, for a line that is not whole, not JSON, or of another format.
    """
    entry: dict[str, Any] = _decoded(line)
    _check_fields(entry, _EVERY_LINE)
    if entry["kind"] == "run":
        _check_run(entry)
    else:
        _check_fields(entry, {"key": _OBJECT, "launch": _FROM_1})
        _check_fields(entry["key"], _KEY)
        if entry["kind"] == "error":
            _check_fields(entry, {"message": _TEXT})
        else:
            _check_point(entry)
    return entry


def _decoded(line: bytes) -> Any:
    try:
        return json.loads(line, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _check_run(entry: dict[str, Any]) -> None:
    _check_fields(entry, _RUN)
    _check_fields(entry["software"], _SOFTWARE)
    _check_fields(entry["software"]["packages"], {"treeattn": _perhaps(_TEXT)})
    if not entry["ranks"]:
        raise ValueError("ranks is empty")
    for rank in entry["ranks"]:
        _check_fields(rank, _RANK)
    if not _perhaps(_TEXT).holds(entry.get("warning")):
        raise ValueError("warning is not text or null")


def _check_point(entry: dict[str, Any]) -> None:
    _check_fields(entry, _POINT)
    _check_fields(entry, {name: kind for name, kind in _OPTIONAL.items() if name in entry})
    judged = entry["key"]["scheme"] not in (FLOOR, NULL)
    _check_fields(entry, dict.fromkeys(_ERRORS, _ERROR if judged else _NOTHING))
    if judged:
        _check_fields(entry, {"digest": _TEXT})
        entry |= {name: float(entry[name]) for name in _ERRORS}


def _check_fields(entry: Any, fields: Mapping[str, _Kind]) -> None:
    if not isinstance(entry, dict):
        raise ValueError("not an object")
    for name, kind in fields.items():
        if name not in entry:
            raise ValueError(f"{name} is missing")
        if not kind.holds(entry[name]):
            raise ValueError(f"{name} is not {kind.words}")
