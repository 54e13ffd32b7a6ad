"""How the command line reads numbers and lists of them."""

from __future__ import annotations

from treeattn.errors import ArgumentError

__all__ = ["durations", "number", "numbers"]

_UNITS = {"Ki": 1024, "Mi": 1024**2, "k": 1000, "M": 1000**2}
_SECONDS = {"us": 1.0, "µs": 1.0, "ms": 1e3, "s": 1e6}


def number(option: str, text: str) -> int:
    """A whole number; k = 1000, Ki = 1024, M and Mi likewise. Raises `ArgumentError`."""
    times = 1
    for unit, factor in _UNITS.items():
        if text.endswith(unit):
            text, times = text.removesuffix(unit), factor
            break
    if not text.strip().isdecimal() or len(text) > 18:
        raise ArgumentError(f"{option} {text!r:.40}: give a whole number, such as 65536 or 64Ki")
    return int(text) * times


def numbers(option: str, text: str, low: int = 1) -> list[int]:
    """Whole numbers separated by commas, each once and at least `low`. Raises `ArgumentError`."""
    values = [number(option, part) for part in text.split(",")]
    if min(values) < low:
        raise ArgumentError(f"{option} {text}: {min(values)} is too small, {low} is the least")
    return list(dict.fromkeys(values))


def durations(option: str, text: str) -> list[float]:
    """Times in microseconds, from 0, 100us, 1ms, separated by commas. Raises `ArgumentError`."""
    return list(dict.fromkeys(_duration(option, part.strip()) for part in text.split(",")))


def _duration(option: str, text: str) -> float:
    if text == "0":
        return 0.0
    for unit, factor in _SECONDS.items():
        if text.endswith(unit):
            try:
                value = float(text.removesuffix(unit)) * factor
            except ValueError:
                break
            if 0 <= value < 1e9:
                return value
    raise ArgumentError(f"{option} {text!r}: give 0 or a time with its unit, such as 100us or 1ms")
