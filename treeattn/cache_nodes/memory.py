"""How much memory cache nodes have for keys and values, and how many tokens that is on all of them."""

from __future__ import annotations

from collections.abc import Sequence

from treeattn.errors import ArgumentError

__all__ = ["capacity", "read_bytes"]

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


def capacity(wanted: int | None, token_bytes: int, free: Sequence[int | None]) -> int:
    """Tokens of the longest sequence on all nodes together: `wanted`, or as many as there is room for.

    token_bytes: of a token in all layers and sequences. free: bytes of each node, of which each holds as
    many tokens; None of one that was not given a limit. Raises `ArgumentError` where they do not fit.
    """
    nodes, least = len(free), min((size for size in free if size is not None), default=None)
    if wanted is None and None in free:
        raise ArgumentError(
            "capacity is not given: pass it, or say what each node has: treeattn cache-node --memory 200GB"
        )
    if least is not None:
        room = least // token_bytes * nodes
        if room < (wanted or 1):
            raise ArgumentError(
                f"capacity {wanted or 1}: there is room for {room} tokens of {_shown(token_bytes)} on "
                f"{nodes} cache nodes, of which rank {free.index(least) + 1} has least, {_shown(least)}: "
                "take fewer tokens, or more nodes"
            )
        wanted = room if wanted is None else wanted
    assert wanted is not None
    return wanted


def _shown(size: int) -> str:
    unit = next(unit for unit in ("TB", "GB", "MB", "kB", "B") if size >= _UNITS[unit] or unit == "B")
    return f"{size / _UNITS[unit]:.3g} {unit}"
