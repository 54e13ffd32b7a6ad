"""What measuring chose for the kernels (kernels/cpu/tuned.h), for each instruction set and processor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from treeattn.errors import BackendError

#: Macros of tuned.h, each a number for every element type in the order of simd.h, and the numbers to try.
SETTINGS: Mapping[str, tuple[int, ...]] = {
    "BLOCK_TOKENS": (128, 256, 512),
    "VALUES_AHEAD": (0, 512, 2048, 8192),
}
TYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")

Chosen = Mapping[str, list[int]]


def read(path: Path) -> Chosen:
    """A choice that was written. Raises `BackendError` for any other content."""
    try:
        chosen = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise BackendError(
            f"{path}: cannot be read ({error}): delete it, or run treeattn roofline --tune"
        ) from None
    if not (
        isinstance(chosen, dict)
        and chosen.keys() == SETTINGS.keys()
        and all(isinstance(one, list) and len(one) == len(TYPES) for one in chosen.values())
        and all(type(n) is int and n in SETTINGS[name] for name, one in chosen.items() for n in one)
    ):
        raise BackendError(
            f"{path}: is not what treeattn roofline --tune writes: delete it, or run that again"
        )
    return chosen
