"""What tests of several pages share."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def fill_tables() -> ModuleType:
    """docs/fill_tables.py, which is no part of the package."""
    page = Path(__file__).resolve().parents[2] / "docs/fill_tables.py"
    spec = importlib.util.spec_from_file_location("fill_tables", page)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
