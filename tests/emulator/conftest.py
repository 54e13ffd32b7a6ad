"""For the tests of this folder: a compiler, without which they are skipped, and a GPU."""

import pytest

from treeattn.backends.cuda import cupy_runtime

from .raw_module import compiler_problem
from .runtime import EmulatorRuntime


def pytest_runtest_setup() -> None:
    if problem := compiler_problem():
        pytest.skip(problem)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> EmulatorRuntime:
    """What device="cuda" finds."""
    emulator = EmulatorRuntime()
    monkeypatch.setattr(cupy_runtime, "current", lambda: emulator)
    return emulator
