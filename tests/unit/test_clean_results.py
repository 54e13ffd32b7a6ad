"""What the committed results say of where they come from."""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[2] / "docs" / "results"
FILES = sorted(path for path in RESULTS.rglob("*") if path.suffix in {".json", ".xz", ".jsonl"})


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_results_come_from_a_clean_commit(path: Path) -> None:
    """A number that nobody can measure again, since its sources were never committed, is no result."""
    text = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    assert b"+dirty" not in text
