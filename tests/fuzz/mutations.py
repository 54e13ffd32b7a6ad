"""Drawn damage to valid files: of bytes, of text, of the tree in JSON, of safetensors headers."""

import copy
import json
import random
import re
import struct
from collections.abc import Callable, Iterator
from typing import Any

#: What a value may be replaced by.
ODD: list[Any] = [
    None, True, 0, -1, 1, 2, 63, 2**31, 2**63, 2**64, 10**400, -0.5, 1e308, float("nan"), float("inf"),
    "", "x", "a b", "\n", "\0", "é", "../x", "/dev/null", "9" * 5000, [], {}, [[]], [0], ["x"], {"x": 1},
]  # fmt: skip
WORDS = [
    *map(str, ODD[1:15]), "", "=", ":", "(" * 50, "[" * 3000, '{"a":' * 3000, '"', "<", "&x;", "#", "٣",
    "9" * 5000,
]  # fmt: skip
_VALUE = re.compile(rb"-?\d+(?:\.\d+)?|[A-Za-z_]+|[^\sA-Za-z_0-9]")


def of_bytes(data: bytes, draw: random.Random) -> bytes:
    at, end = sorted(draw.randrange(len(data) + 1) for _ in "ab")
    piece = data[at : min(end, at + 64)]
    other = draw.randrange(len(data) + 1)
    number = struct.pack("<Q", 2 ** draw.randrange(64))
    noise = draw.choice([b"\0", b"\xff", b"\n", b"\xc3", draw.randbytes(8), number])
    head = data[:at]
    changed = head, head + data[end:], head + noise + data[at:], head + noise + data[at + len(noise) :]
    return draw.choice([*changed, data[:other] + piece + data[other:]])


def of_text(data: bytes, draw: random.Random) -> bytes:
    """A number or word becomes another of the file or an odd one; a line is doubled, removed or moved."""
    if draw.random() < 0.3:
        lines = data.splitlines(keepends=True)
        line = lines.pop(draw.randrange(len(lines))) if lines else b""
        for _ in range(draw.randrange(3)):
            lines.insert(draw.randrange(len(lines) + 1), line)
        return b"".join(lines)
    found = list(_VALUE.finditer(data))
    if not found:
        return of_bytes(data, draw)
    old, other = draw.choice(found), draw.choice(found)
    new = other[0] if draw.random() < 0.4 else draw.choice(WORDS).encode()
    return data[: old.start()] + new + data[old.end() :]


def of_json(data: bytes, draw: random.Random) -> bytes:
    """An entry becomes odd, goes, is doubled, or takes the value of another."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return of_bytes(data, draw)
    _damage(tree, draw)
    return json.dumps(tree).encode()


def of_json_lines(data: bytes, draw: random.Random) -> bytes:
    if draw.random() < 0.3:
        return of_text(data, draw)
    lines = data.splitlines() or [b""]
    at = draw.randrange(len(lines))
    lines[at] = of_json(lines[at], draw)
    return b"\n".join(lines)


def of_safetensors(data: bytes, draw: random.Random) -> bytes:
    """The header, with a length that fits or not."""
    if len(data) < 8 or draw.random() < 0.2:
        return of_bytes(data, draw)
    (length,) = struct.unpack("<Q", data[:8])
    header = draw.choice([of_json, of_json, of_json, of_text])(data[8 : 8 + length], draw)
    said = len(header) + (0 if draw.random() < 0.9 else draw.choice([-1, 1, 8, 2**40]))
    return struct.pack("<Q", said % 2**64) + header + data[8 + length :]


def mutant(seeds: list[bytes], kind: Callable[[bytes, random.Random], bytes], seed: int) -> bytes:
    """One of these files with one to four changes, mostly those that keep its structure."""
    draw = random.Random(seed)
    data = draw.choice(seeds)
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        data = draw.choice([kind, kind, kind, of_bytes])(data, draw)
    return data


def _damage(tree: Any, draw: random.Random) -> None:
    places = list(_places(tree))
    if not places:
        return
    holder, key = draw.choice(places)
    how = draw.randrange(5)
    if how == 0:
        del holder[key]
    elif how == 1:
        other, name = draw.choice(places)
        holder[key] = copy.deepcopy(other[name])
    elif how == 2 and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    elif how == 2:
        holder[draw.choice(["x", "", "é"])] = holder.pop(key)
    elif how == 3 and type(holder[key]) is int:
        holder[key] += draw.choice([-1, 1, 2**32])
    else:
        holder[key] = draw.choice(ODD)


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in entries:
        yield tree, key
        yield from _places(value)
