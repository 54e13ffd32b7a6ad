"""How many cases hypothesis draws: always the same ones, and ten times as many in a deep run."""

from __future__ import annotations

import os

from hypothesis import settings

__all__ = ["FACTOR", "examples"]

#: `make test-deep` sets 10.
FACTOR = int(os.environ.get("TREEATTN_TEST_FACTOR", "1"))


def examples(count: int) -> settings:
    """Decorates a test with `given`: so many cases, times `FACTOR`, of a fixed seed."""
    return settings(max_examples=count * FACTOR, derandomize=True, deadline=None, database=None)
