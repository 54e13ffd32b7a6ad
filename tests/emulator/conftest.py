"""A GPU for the tests of this folder."""

from __future__ import annotations

import pytest

from treeattn.backends.cuda import cupy_runtime

from .runtime import EmulatorRuntime


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> EmulatorRuntime:
    """What device="cuda" finds."""
    emulator = EmulatorRuntime()
    monkeypatch.setattr(cupy_runtime, "current", lambda: emulator)
    return emulator
