"""How much memory a cache node has for keys and values, and how many tokens that is on all of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from treeattn.errors import ArgumentError

__all__ = ["available", "capacity", "read_bytes", "shown"]

_UNITS = {
    "TB": 10**12,
    "GB": 10**9,
    "MB": 10**6,
    "kB": 1000,
    "TiB": 1 << 40,
    "GiB": 1 << 30,
    "MiB": 1 << 20,
    "B": 1,
}
_SHARE = 0.9  # of what is free: the rest is for messages, records and whatever else runs there


def read_bytes(text: str) -> int:
    """Read a number of bytes, such as 200GB or 1.5TiB. Raises `ArgumentError`."""
    unit = next((unit for unit in _UNITS if text.endswith(unit)), "")
    try:
        size = float(text.removesuffix(unit)) * _UNITS[unit]
    except (ValueError, KeyError):
        size = 0
    if not 1 <= size < 1 << 60:
        raise ArgumentError(
            f"{text!r:.40} is no memory: give a number with its unit, such as 200GB or 1.5TiB"
        )
    return int(size)


def shown(size: int) -> str:
    """Bytes in words."""
    unit = next(unit for unit in ("TB", "GB", "MB", "kB", "B") if size >= _UNITS[unit] or unit == "B")
    return f"{size / _UNITS[unit]:.3g} {unit}"


def available(sharing: int, root: Path = Path("/")) -> int:
    """Bytes that one of `sharing` processes of this machine may take: nine tenths of what is free in the
    machine and in this process's control group."""
    lines = (root / "proc/meminfo").read_text().splitlines()
    free = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    for group in _groups(root):
        limit, used = _number(group / "memory.max"), _number(group / "memory.current")
        if limit is not None and used is not None:
            free = min(free, max(limit - used, 0))
    return int(_SHARE * free) // sharing


def _groups(root: Path) -> list[Path]:
    """The control group of this process and those around it (version 2)."""
    try:
        named = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    own = next((line.removeprefix("0::/") for line in named if line.startswith("0::/")), None)
    if own is None:
        return []
    top = root / "sys/fs/cgroup"
    return [group for group in (top / own, *(top / own).parents) if group == top or top in group.parents]


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def capacity(wanted: int | None, token_bytes: int, free: Sequence[int]) -> int:
    """Tokens of the longest sequence on all nodes together: `wanted`, or as many as there is room for.

    token_bytes: of a token in all layers and sequences. free: bytes of each node, of which each holds as
    many tokens. Raises `ArgumentError` where they do not fit.
    """
    nodes, least = len(free), min(free)
    room = least // token_bytes * nodes
    if wanted is None and room > 0:
        return room
    if room < (wanted or 1):
        where = free.index(least) + 1
        raise ArgumentError(
            f"capacity {wanted or 1}: there is room for {room} tokens of {shown(token_bytes)} on {nodes} "
            f"cache nodes, of which rank {where} has least, {shown(least)}: take fewer tokens, or "
            "more nodes"
        )
    assert wanted is not None
    return wanted
