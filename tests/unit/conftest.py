"""Thousands of tests stay in memory while they run: the garbage collector need not look at them each time."""

from __future__ import annotations

import gc

import pytest


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.collect()
    gc.freeze()
