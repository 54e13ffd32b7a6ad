"""Tests of this folder are skipped, with the reason, where there is no GPU."""

from __future__ import annotations

import pytest

from treeattn.backends.cuda import cupy_runtime


def pytest_runtest_setup() -> None:
    if problem := cupy_runtime.problem():
        pytest.skip(problem)
