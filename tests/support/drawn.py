"""How many cases are drawn: always the same ones, and more or all of them in a deep run."""

import os
import random
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

#: `make test-deep` sets 10.
FACTOR = int(os.environ.get("TREEATTN_TEST_FACTOR", "1"))


def examples(count: int) -> settings:
    """Decorates a test with `given`: so many cases, times `FACTOR`, of a fixed seed."""
    return settings(max_examples=count * FACTOR, derandomize=True, deadline=None, database=None)


def sample(count: int, cases: Iterable[Any], seed: int = 0) -> list[Any]:
    """All cases of `parametrize`, of which all but `count` drawn ones are marked deep."""
    cases = list(cases)
    kept = set(random.Random(seed).sample(range(len(cases)), min(count, len(cases))))
    return [case if number in kept else _deep(case) for number, case in enumerate(cases)]


def _deep(case: Any) -> Any:
    if isinstance(case, type(pytest.param())):
        return pytest.param(*case.values, marks=[*case.marks, pytest.mark.deep], id=case.id)
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.deep)
